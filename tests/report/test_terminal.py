import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from report import samples
from torchtrim.records.report import Report
from torchtrim.report import terminal

NEXT = "torchtrim run train.py --plan train.plan.json"
PATHS = {"report": Path("train.report.html"), "plan": Path("train.plan.json")}


def printed(
    report: Report,
    width: int = 80,
    *,
    encoding: str = "utf-8",
    terminal_like: bool = False,
    paths: dict[str, Path] = PATHS,
    next_command: str | None = NEXT,
    amount: terminal.Amount = "screen",
    height: int = 24,
) -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, newline="\n") as file:
        console = Console(
            file=file,
            width=width,
            height=height,
            force_terminal=terminal_like,
            legacy_windows=False,
        )
        terminal.render(report, console, next_command=next_command, paths=paths, amount=amount)
        file.flush()
        return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("name", samples.ALL)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_are_never_wider_than_the_terminal(name: str, width: int) -> None:
    lines = printed(samples.ALL[name], width).splitlines()
    own = [line for line in lines if not line.startswith(("+", "-"))]  # A diff is never cut.
    assert max(map(cell_len, own)) <= width


@pytest.mark.parametrize("name", samples.ALL)
def test_fits_a_screen(name: str) -> None:
    assert len(printed(samples.ALL[name]).splitlines()) <= 40
    assert len(printed(samples.ALL[name], terminal_like=True, height=40).splitlines()) < 40


def test_optimize_says_every_key_fact_in_a_screen() -> None:
    text = printed(samples.OPTIMIZE)
    for fact in ("BITWISE", "412 MiB", "236 MiB", "240 MiB", "-43 %", "budget 247 MiB"):
        assert fact in text
    for finding in samples.FINDINGS:
        assert finding.code in text
    assert "(+11 %, one run each)" in text
    assert "models/encoder.py:42" in text
    assert "every gradient of 3 steps: identical" in " ".join(text.split())
    assert "24 gradients x 3 steps" in printed(samples.OPTIMIZE, amount="all")
    assert "3.20 ms modelled" in text
    assert "train.report.html, train.plan.json" in text


def test_the_answer_comes_first_and_ends_in_the_next_command() -> None:
    answer, _, evidence = printed(samples.OPTIMIZE).partition("\n\n")
    labels = [line.split()[0] for line in answer.splitlines() if not line.startswith(" ")]
    assert labels == ["Fits:", "plan", "certificate", "wrote", "next"]
    assert answer.splitlines()[-1].split(maxsplit=1) == ["next", NEXT]
    assert "live at the peak" in evidence


def test_without_a_plan_the_last_line_is_the_next_command() -> None:
    assert printed(samples.DIAGNOSE).splitlines()[-1].split(maxsplit=1) == ["next", NEXT]
    assert "next" not in printed(samples.OPTIMIZE, next_command=None)


def test_a_long_next_command_continues_as_a_shell_reads_it() -> None:
    command = "torchtrim run " + " ".join(f"--option-{i} value{i}" for i in range(6))
    text = printed(samples.VERIFY, 40, next_command=command)
    tail = text[text.index("next") + 4 :].replace("\\\n", "")
    assert tail.split() == command.split()


def test_counts_come_first_and_the_rest_is_counted() -> None:
    many = msgspec.structs.replace(samples.OPTIMIZE, findings=samples.FINDINGS * 5)
    text = printed(many)
    assert re.search(r"25 findings \(top \d+, \+\d+ more\): 15 memory", text)
    assert len(text.splitlines()) <= 40


def test_diagnose_speaks_of_no_plan() -> None:
    text = printed(samples.DIAGNOSE)
    assert text.startswith("5 findings: peak 412 MiB\n  step 612 ms +- 10.0 ms\n")
    assert "predicted" not in text
    assert "certificate" not in text


def test_a_program_without_findings_is_called_clean() -> None:
    clean = msgspec.structs.replace(samples.DIAGNOSE, findings=())
    assert printed(clean).startswith("No findings: peak 412 MiB")


def test_plan_marks_its_figures_as_predicted() -> None:
    text = printed(samples.PLANNING)
    assert "peak 412 MiB -> 240 MiB predicted (-42 %)" in text
    assert "model.encoder.layers.0-3" in text
    assert "193 MiB" in text


def test_verify_gives_the_certificate_alone() -> None:
    text = printed(samples.VERIFY)
    assert text.startswith("Verified: results identical bit for bit\n")
    assert "8 buffers" in " ".join(printed(samples.VERIFY, amount="all").split())


def test_not_equal_names_the_first_place() -> None:
    text = " ".join(printed(samples.NOT_EQUAL).split())
    assert "first difference: gradient of model.encoder.layers.3 at models/encoder.py:43" in text
    assert "largest difference 3.1e-02" in text


def test_undecided_over_budget_says_both_and_no_change_is_a_result() -> None:
    text = " ".join(printed(samples.UNDECIDED).split())
    assert text.startswith(
        "UNDECIDED: the original differs from run to run, and the peak is over the budget"
    )
    assert "missed by 4.00 MiB" in text
    assert "no significant change, +1 %, one run each" in text
    assert "noise 3.4e-06" in text


def test_a_budget_on_reserved_memory_reports_reserved_memory() -> None:
    original, planned = (
        msgspec.structs.replace(f, reserved_bytes=mib * samples.MIB)
        for f, mib in ((samples.ORIGINAL, 600), (samples.PLANNED, 300))
    )
    report = msgspec.structs.replace(
        samples.OPTIMIZE, original=original, planned=planned, memory_kind="reserved"
    )
    assert "reserved peak 600 MiB -> 300 MiB (-50 %)" in printed(report)


def test_emulated_time_is_not_called_the_device_s() -> None:
    report = msgspec.structs.replace(samples.DIAGNOSE, device="emulated a10g")
    assert "step on this CPU" in printed(report)
    assert "on an emulated A10G" in printed(report)


def test_a_pipe_gets_plain_ascii() -> None:
    text = printed(samples.OPTIMIZE)
    assert text.isascii()
    assert "\x1b" not in text


def test_no_color_keeps_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(samples.OPTIMIZE, terminal_like=True)
    assert "BITWISE" in text
    assert "\x1b[3" not in text
    assert "\x1b[9" not in text


def test_a_terminal_gets_colour_and_blocks() -> None:
    text = printed(samples.OPTIMIZE, terminal_like=True)
    assert "\x1b[1;32mFits: " in text
    assert "█" in text


def test_an_ascii_terminal_gets_no_blocks_and_foreign_names_survive() -> None:
    holder = msgspec.structs.replace(samples.HOLDERS[0], module="модель.слой")
    report = msgspec.structs.replace(samples.OPTIMIZE, holders=(holder,))
    text = printed(report, 120, encoding="ascii", terminal_like=True)
    assert "\\u043" in text


@pytest.mark.parametrize("terminal_like", [False, True])
def test_hostile_names_are_inert(terminal_like: bool) -> None:
    text = printed(samples.HOSTILE_REPORT, terminal_like=terminal_like)
    assert "[red]" in text
    for poison in ("\x1b[31m", "\u202e", "\u200f", "\r"):
        assert poison not in text


def test_a_path_keeps_its_end() -> None:
    long = Path("/very") / "/".join(["deep"] * 40) / "report.html"
    text = printed(samples.OPTIMIZE, paths={"report": long})
    assert "deep/report.html" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_place_keeps_the_name_of_its_file() -> None:
    named = msgspec.structs.replace(
        samples.FINDINGS[0], path="/home/ana/segmenter/models/segmentation.py"
    )
    text = printed(msgspec.structs.replace(samples.OPTIMIZE, findings=(named,)))
    assert "  segmentation.py:43  " in text


def test_nothing_to_fix_is_said_only_where_fixes_were_all_that_was_asked_for() -> None:
    nothing = msgspec.structs.replace(samples.FIXED.fixes, places=(), syncs_before=0, diff="")
    fixed = msgspec.structs.replace(samples.FIXED, fixes=nothing)
    assert "none: the script's own source has no host-device syncs" in printed(fixed)
    assert "has no host-device syncs" not in printed(
        msgspec.structs.replace(fixed, plan=samples.PLAN)
    )


def test_wide_characters_are_measured_in_cells() -> None:
    finding = msgspec.structs.replace(samples.FINDINGS[0], path="/模型/" * 30, message="注意" * 60)
    report = msgspec.structs.replace(samples.OPTIMIZE, findings=(finding,))
    assert max(map(cell_len, printed(report).splitlines())) <= 80


@pytest.mark.parametrize("name", samples.ALL)
def test_quiet_is_the_headline_and_what_was_written(name: str) -> None:
    every = printed(samples.ALL[name]).splitlines()
    lines = printed(samples.ALL[name], amount="headline").splitlines()
    assert lines[0] == every[0]
    assert lines[-1].startswith("wrote")
    assert len(lines) <= len(every) // 2


@pytest.mark.parametrize("name", samples.ALL)
def test_verbose_leaves_nothing_out(name: str) -> None:
    report = samples.ALL[name]
    text = printed(report, amount="all")
    assert " more" not in text
    for finding in report.findings:
        assert text.count(finding.code) >= sum(one.code == finding.code for one in report.findings)
    joined = "".join(text.split())
    for note in report.notes:
        assert name == "hostile" or "".join(note.split()) in joined


def test_what_is_cut_says_where_it_is_whole(tmp_path: Path) -> None:
    note = "one word and another of a sentence that no line of a terminal has room for " * 40
    long = msgspec.structs.replace(samples.OPTIMIZE, notes=(note,))
    paths = {"report": tmp_path / "report.json"}
    out = io.StringIO()
    terminal.render(long, Console(file=out, width=200), next_command=None, paths=paths)
    assert f"cut here     whole in {tmp_path / 'report.json'} or --verbose" in out.getvalue()
    short = msgspec.structs.replace(long, notes=("a note",), findings=long.findings[:1])
    assert "cut here" not in printed(short, 200)


def test_a_file_has_whole_sentences_where_a_screen_cuts_them() -> None:
    note = "a word of a sentence that goes on for three lines of a terminal, or a few more " * 3
    report = msgspec.structs.replace(samples.OPTIMIZE, notes=(f"{note} and its end",))
    assert "and its end" in printed(report, 80)
