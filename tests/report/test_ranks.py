"""What reports say of ranks, and the trace of all of them."""

from __future__ import annotations

import io
import json

from msgspec.structs import replace
from rich.console import Console

from profiles import Step
from report import samples
from torchtrim.records import Profile
from torchtrim.records.figures import RankFigures
from torchtrim.report import html, job_trace, terminal
from torchtrim.report.formats import markdown
from torchtrim.report.sections import rank_lines

MIB = 2**20
REPORT = replace(
    next(one for one in samples.ALL.values() if one.original is not None),
    device="cpu",
    ranks=tuple(
        RankFigures(
            rank=number,
            original=samples.figures(100, 1.0, 0.0, activation=100),
            planned=samples.figures(70, 1.0, 0.0, activation=70) if number else None,
            collectives=2 * number,
            exchanged_bytes=3 * MIB,
            blocked_seconds=0.25,
            waited_seconds=0.125,
        )
        for number in (0, 1)
    ),
)


def rank(number: int) -> Profile:
    step = Step()
    step.wait(0.25, 2)
    step.op("aten::mm", seconds=1.0, line=3)
    step.exchange(4096, 0.5)
    return step.profile(rank=number, clock=10.0 + number / 4)


def test_a_line_for_each_rank() -> None:
    one, other = rank_lines(REPORT)
    assert one.startswith("rank 0: peak 100")
    assert "-> 70.0 MiB" in other
    assert "2 collectives of 3.00 MiB, blocked by them 250 ms, 125 ms of it for a later" in other


def test_an_emulated_device_tells_no_times() -> None:
    assert "blocked" not in "".join(rank_lines(replace(REPORT, device="emulated")))


def test_one_process_has_no_lines() -> None:
    assert rank_lines(replace(REPORT, ranks=())) == []


def test_every_form_says_it() -> None:
    out = io.StringIO()
    terminal.render(REPORT, Console(file=out, width=120), next_command=None)
    for text in (out.getvalue(), markdown.render(REPORT), html.render(REPORT, None, None)):
        assert "rank 0: peak 100" in text


def test_the_trace_has_a_process_for_each_rank_and_a_lane_of_communication() -> None:
    events = json.loads(job_trace.render([rank(0), rank(1)]))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "operators", "data loader", "communication"}
    exchanged = [e for e in events if e["name"] == "allreduce" and "bytes" in e["args"]]
    assert [(e["pid"], e["ts"], e["dur"]) for e in exchanged] == [
        (0, 1e6, 5e5),
        (1, 1.25e6, 5e5),
    ]
    assert exchanged[0]["args"]["bytes"] == 4096


def test_the_trace_without_source_has_no_places() -> None:
    assert "train.py" in job_trace.render([rank(0)]).decode()
    assert "train.py" not in job_trace.render([rank(0)], source=False).decode()
