"""Long work is told of: its phases, its time, what is left, and how far it came when interrupted."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

import click
import pytest

from torchtrim.api import optimize_report
from torchtrim.cli import progress as module
from torchtrim.cli.main import main
from torchtrim.cli.progress import Phases, progress
from torchtrim.records import files

CLOCK = re.compile(r"\d\d:\d\d:\d\d ")
LINE = re.compile(r"\d\d:\d\d:\d\d  (.*)  \d+ s(?:, about \d+ s left)?")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Log, "quiet_seconds", 0.0)
    monkeypatch.setattr(module.Log, "interval", 3600.0)  # No line depends on the moment.


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that begin with a time, without their times and without the first one of a slow machine.

    Others on the same file are not progress: torch and what other tests have started write there too.
    """
    timed = [line for line in capfd.readouterr().err.splitlines() if CLOCK.match(line)]
    found = [LINE.fullmatch(line) for line in timed]
    lines = [one.group(1) if one else "no seconds" for one in found]
    return [one for one in lines if not one.endswith("importing torch")]


def test_a_line_for_each_phase_with_its_number(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("original", "planned") as tell:
        for what in ("original", "planned"):
            tell(f"{what}: the script starts")
            for step in range(3):
                tell(f"{what}: step {step + 1} of 3")
    assert said(capfd) == [
        "2 of 3  original: the script starts",
        "3 of 3  planned: the script starts",
    ]


def test_the_number_of_phases_never_changes(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("original", "planned") as tell:
        for what in ("original", "original, its longest step", "planned", "planned", "planning"):
            tell(f"{what}: the script starts")
            tell(f"{what}: step 1 of 1")
    assert said(capfd) == [
        "2 of 3  original: the script starts",
        "extra 1  original, its longest step: the script starts",
        "3 of 3  planned: the script starts",
        "extra 2  planned: the script starts",
        "extra 3  planning: the script starts",
    ]


def test_a_phase_that_is_left_out_keeps_its_number(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("original", "planning", "planned") as tell:
        tell("planned: the script starts")
    assert said(capfd) == ["4 of 4  planned: the script starts"]


def test_texts_that_differ_in_numbers_are_one(capfd: pytest.CaptureFixture[str]) -> None:
    with progress() as tell:
        for count in (3, 12):
            tell(f"{count} of 12 buffers")
        tell("checking")
    assert said(capfd) == ["3 of 12 buffers", "checking"]


def test_it_is_never_silent_for_long(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.Log, "most_silent_seconds", 20.0)
    now = [0.0]
    log = module.Log(Phases(clock=lambda: now[0]))
    for step in (1, 2):
        log.tell(f"original: step {step} of 5")
    for now[0] in (19.0, 21.0, 39.0, 42.0):
        log._look()
    assert said(capfd) == ["original: step 1 of 5", *["original: step 2 of 5"] * 2]


def test_a_line_says_that_more_is_left_than_the_last_one_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = Run("original", "planning")
    log = module.Log(run.phases)
    run.until("original", 4.0, 5)
    log.tell("planning: a frontier")
    for seconds in (0.1, 0.1, 60.0, 0.1):
        run.now += seconds
        log._look()
    assert said(capfd) == ["3 of 3  planning: a frontier"] * 2


def test_the_first_line_comes_before_anything_is_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.Log, "interval", 0.1)
    with progress():
        time.sleep(0.6)
    assert "  importing torch  " in capfd.readouterr().err


def test_what_is_over_at_once_says_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.Log, "quiet_seconds", 60.0)
    with progress() as tell:
        tell("original: step 1 of 5")
    assert capfd.readouterr().err == ""


def test_names_from_outside_are_made_harmless(capfd: pytest.CaptureFixture[str]) -> None:
    with progress() as tell:
        tell("original\x1b[31m: step 1 of 5")
    assert "\x1b" not in capfd.readouterr().err


@pytest.mark.parametrize(("amount", "lines"), [("all", 4), (None, 2), ("headline", 0)])
def test_verbose_tells_each_step_and_quiet_none(
    amount: str | None, lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    context = click.Context(click.Command("verb"))
    context.params["amount"] = amount
    with context, progress() as tell:
        for what in ("original", "planned"):
            for step in (1, 2):
                tell(f"{what}: step {step} of 2")
    assert len(said(capfd)) == lines


def test_on_a_terminal_one_line_changes_and_goes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    with progress("original") as tell:
        tell("original: step 1 of 2, and much more than fits")
    shown = capfd.readouterr().err.split("\r")
    assert shown[1].startswith("1 of 2  importing torch  0 s")
    assert shown[-1] == "\x1b[K"
    assert all(len(one.removesuffix("\x1b[K")) < 30 for one in shown)
    assert "\n" not in "".join(shown)


class Run:
    """A verb's runs on a clock of their own: imports of 4 s, two recorded steps of 1 s, and quicker ones."""

    def __init__(self, *expected: str) -> None:
        self.now, self.modules = 0.0, 0
        self.phases = Phases(expected, clock=lambda: self.now, imported=lambda: self.modules)
        self.after(4.0)
        self.modules = module._MODULES

    def after(self, seconds: float, text: str = "") -> float | None:
        self.now += seconds
        if text:
            self.phases.tell(text)
        return self.phases.left

    def until(self, name: str, startup: float, steps: int, of: int = 5) -> float:
        self.after(0.0, f"{name}: the script starts")
        self.now += startup
        for step in range(1, steps + 1):
            self.after(0.0, f"{name}: step {step} of {of}")
            self.now += 1.0 if step < 3 else 0.5
        assert self.phases.left is not None
        return self.phases.left


RUN = 4.0 + 2 * 1.0 + 3 * 0.5


def test_what_is_left_is_said_once_half_of_torch_is_imported() -> None:
    run = Run("original", "planned")
    run.modules = 0
    assert run.phases.left is None
    run.modules = module._MODULES * 3 // 5
    half = run.phases.left
    run.modules = module._MODULES
    assert half > run.phases.left + 2.0


def test_it_follows_the_steps_once_one_was_timed() -> None:
    run = Run("original", "planned")
    early = run.until("original", 4.0, 1)
    left = run.after(0.0, "original: step 2 of 5")
    assert left == pytest.approx(RUN - 5 + 3 * 0.5 + RUN, rel=0.3)
    assert left > early


def test_later_runs_take_as_long_as_the_first() -> None:
    run = Run("original", "planned", "again")
    run.until("original", 4.0, 5)
    left = run.after(0.0, "planned: the script starts")
    assert left == pytest.approx(2 * RUN, rel=0.2)
    assert run.until("planned", 8.0, 2) > left - 8.0


def test_runs_after_a_missed_budget_are_foreseen_when_it_is_missed() -> None:
    run = Run("original", "planning", "planned")
    run.until("original", 4.0, 5)
    before = run.after(0.0, "planning: for 60.0 MiB")
    missed = run.after(0.1, "planning: no plan for 60.0 MiB is known; then 4 techniques alone")
    assert missed > before + 4 * 0.4 * RUN
    run.until("planned", 4.0, 5)
    first = run.after(0.0, "trying precision: the script starts")
    run.until("trying precision", 4.0, 3, of=3)
    assert run.after(0.0, "trying low_bit_states: the script starts") < first - 0.4 * RUN


def test_a_phase_that_takes_longer_raises_what_is_left() -> None:
    run = Run("original", "planning")
    run.until("original", 1.0, 5)
    run.after(0.0, "planning: a frontier")
    assert run.after(10.0) < run.after(10.0) < run.after(80.0)


@pytest.fixture
def interrupted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run a verb whose work ends by Ctrl-C, and return its exit code and stderr."""

    def run(work: Callable[..., None], *words: str) -> tuple[int, str]:
        monkeypatch.setattr(f"torchtrim.api.{optimize_report.__name__}", work, raising=False)
        monkeypatch.setattr(module.Log, "quiet_seconds", 60.0)
        monkeypatch.setattr(sys, "argv", ["torchtrim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capfd.readouterr().err.strip()

    return run


def test_ctrl_c_says_how_far_it_came_and_what_is_known(interrupted, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def work(*_: object, progress: Callable[[str], None], **__: object) -> None:
        progress("original: step 2 of 5")
        stop = KeyboardInterrupt()
        stop.add_note("known so far: the original peaks at 157 MiB")
        raise stop

    code, err = interrupted(work, "optimize", "train.py", "--memory", "60%")
    assert code == 130
    where, *others = err.splitlines()
    assert re.fullmatch(r"interrupted in phase 2 of 5 \(original: step 2 of 5\) after \d+ s", where)
    assert others == ["known so far: the original peaks at 157 MiB", "nothing was written"]


def test_ctrl_c_names_the_files_that_were_written(interrupted, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def work(*_: object, **__: object) -> None:
        files.write_atomically(tmp_path / "plan.toml", b"")
        raise KeyboardInterrupt

    code, err = interrupted(work, "optimize", "train.py", "--memory", "60%")
    assert (code, err.splitlines()[-1]) == (130, f"written: {tmp_path / 'plan.toml'}")
