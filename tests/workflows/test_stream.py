"""Growth of scripts, and the comparison of bounded with unbounded streams, each in its own process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchtrim.errors import ScriptFailed
from torchtrim.records.report import Report
from torchtrim.runner.script import Script
from torchtrim.workflows.stream import StreamRequest, check_report, compared_report

SCRIPT = Path(__file__).parents[1] / "scripts" / "streams.py"
pytestmark = pytest.mark.usefixtures("processes_are_not_traced")


def line(text: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, one in enumerate(lines, 1) if text in one)


def silent(text: str) -> None: ...


def check(kind: str, frames: int = 40) -> Report:
    script = Script(str(SCRIPT), (kind,), timeout=100.0)
    return check_report(script, StreamRequest(frames), 0, silent).report


GROWS = {
    "dict tracker.memory": ("self.memory[self.frame] = ", 1024),
    "list log": ("log.append", 1024),
    "tensor tracker.seen": ("self.seen = torch.cat", 64),
    "lru_cache table": ("        table(frame)", 128),
}


def test_what_grows_is_named_with_its_line_and_bytes() -> None:
    report = check("all")
    assert report.stream is not None
    found = {re.split(" grows| gets", one.message)[0]: one for one in report.findings}
    for name, (fills, tensors) in GROWS.items():
        finding = found.pop(name)
        assert (finding.code, Path(finding.path), finding.line) == ("TT501", SCRIPT, line(fills))
        assert tensors <= (finding.price_bytes or 0) < tensors + 500
    assert found
    assert all("autograd's graph" in name for name in found)
    assert sum(one.price_bytes or 0 for one in found.values()) >= 1024
    assert report.stream.growth_bytes == sum(one.price_bytes or 0 for one in report.findings)
    assert report.stream.frame == "a call of Tracker"


def test_a_stream_that_does_not_grow_and_ends_by_itself() -> None:
    report = check("flat")
    assert report.stream is not None
    assert (report.stream.growth_bytes, report.findings) == (0, ())
    assert report.stream.frames == 14


def test_scripts_that_fail_say_why() -> None:
    with pytest.raises(ScriptFailed, match="camera was unplugged") as failed:
        check("broken")
    assert "29 frames were complete" in failed.value.learnt
    with pytest.raises(ScriptFailed, match="--frames-of"):
        check("none")


def verified(kind: str, frames: int = 30) -> Report:
    script = Script(str(SCRIPT), (kind,), timeout=100.0)
    return compared_report(script, StreamRequest(frames), silent).report


def test_declared_windows_that_are_long_enough() -> None:
    report = verified("declared")
    assert report.certificate is not None
    assert report.stream is not None
    assert report.certificate.verdict == "BITWISE", report.certificate.reason
    assert report.stream.growth_bytes == 0 < 1024 <= (report.stream.unbounded_growth_bytes or 0)
    assert "BoundCaches" in report.stream.bounded


def test_a_window_too_short_is_caught_with_its_frame() -> None:
    certificate = verified("short").certificate
    assert certificate is not None
    assert certificate.verdict == "NOT EQUAL"
    assert certificate.first_difference is not None
    assert certificate.first_difference.op == "output in frame 3"
    assert "declare a longer window" in certificate.reason


@pytest.mark.slow
def test_nothing_bounded_proves_nothing() -> None:
    certificate = verified("flat").certificate
    assert certificate is not None
    assert certificate.verdict == "UNDECIDED"
    assert "no state was bounded" in certificate.reason
