"""A trace's report on a terminal."""

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from torchtrim.records.trace import TraceJob, TraceRank, TraceReport, TraceSet, TraceSite
from torchtrim.report.trace_text import render


def site(name: str = "step", saves: float | None = 1.5, **more: object) -> TraceSite:
    known = TraceSite(
        path="transformers/models/a_long_name_of_a_package/modeling_of_something.py",
        function=name,
        line=1421,
        op="aten::copy_",
        count=5,
        wait_ms=173.006,
        saves_alone_ms=saves,
    )
    return msgspec.structs.replace(known, **more)


def report(**more: object) -> TraceReport:
    known = TraceReport(
        torchtrim="0",
        file="t.json",
        rank=None,
        device="",
        versions={},
        events=3,
        sync_calls=80,
        blocking_copies=1,
        span_ms=1096.5,
        replay_ms=1097.0,
        device_busy_ms=331.8,
        host_waiting_ms=180.8,
        sites=(site(), site("other", 0.0)),
        sets=(TraceSet(sites=(0, 1), saves_ms=180.4), TraceSet(sites=(0,), saves_ms=1.5)),
        bound="waits",
    )
    return msgspec.structs.replace(known, **more)


def text(
    shown: TraceReport, *, width: int = 80, top: int = 8, next_command: str | None = None
) -> str:
    out = StringIO()
    render(shown, Console(file=out, width=width), top=top, next_command=next_command)
    return out.getvalue()


def test_counts_then_sites_then_sets_then_the_bound() -> None:
    lines = text(report(), next_command="torchtrim explain TT101").splitlines()
    assert lines[0] == "WAITS  80 sync calls, 1 blocking copy"
    assert "replay takes 1,097.0 ms (+0.0%)" in lines[1]
    assert "device busy 331.8 ms (30%)" in lines[2]
    joined = "\n".join(lines)
    assert "180.400 ms (16.5%) without all" in joined
    assert "1.500 ms (0.1%) without 1" in joined
    assert lines[-1] == "next      torchtrim explain TT101"
    order = [joined.index(word) for word in ("WAITS", "site", "gains", "bound", "next")]
    assert order == sorted(order)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_is_a_screen_and_no_wider(width: int) -> None:
    many = tuple(site(f"function_{n}") for n in range(30))
    notes = tuple(f"note {n} " + "word " * 60 for n in range(9))
    shown = text(report(sites=many, notes=notes), width=width, next_command="torchtrim")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= max(width, 40)
    if width >= 80:
        assert len(lines) <= 24
    assert "+22 more sites" in shown
    assert "more notes, see --json" in shown


def test_nothing_to_gain_and_no_replay() -> None:
    assert "no gain expected" in text(report(sets=()))
    shown = text(report(replay_ms=None, sets=(), bound="unknown", sites=(site(saves=None),)))
    assert "no gain expected" not in shown
    assert "unknown: the trace cannot be replayed" in shown
    assert shown.splitlines()[4].endswith("  -")


def test_no_waits_device_syncs_and_the_loader() -> None:
    assert text(report(sites=(), sync_calls=0, blocking_copies=0)).startswith("NO WAITS")
    shown = text(report(device_syncs=(site(op="cudaDeviceSynchronize"),), loader_ms=300.0))
    assert "5 device-wide syncs" in shown
    assert "in the data loader 300.0 ms" in " ".join(shown.split())


def test_lines_that_are_known_or_one_of_several() -> None:
    assert ":1421+ step" in text(report(sites=(site(path="a.py"),)))
    assert ":1421 step" in text(report(sites=(site(path="a.py", exact=True),)))
    assert ":3/9 step" in text(report(sites=(site(path="a.py", lines=(3, 9)),)))
    assert "step copy_ (backward)" in text(report(sites=(site(path="a.py", phase="backward"),)))
    assert "## loss ##: copy_" in text(report(sites=(site(path="", within="## loss ##"),)))


def test_ranks() -> None:
    both = report(ranks=(report(rank=0), report(rank=1, file="x/r1.json")))
    assert "waits of each rank: 0: 10, 1: 10" in text(both)


def rank(number: int, made: float) -> TraceRank:
    return TraceRank(
        rank=number,
        clock_ms=0.0,
        collectives=4,
        collectives_ms=9.0,
        exposed_ms=3.25,
        waiting_ms=1.0,
        last=2,
        made_others_wait_ms=made,
    )


@pytest.mark.parametrize("straggler", [None, 1])
def test_what_ranks_had_to_do_with_each_other(straggler: int | None) -> None:
    ranks = (rank(0, 0.0), rank(1, 12.34))
    job = TraceJob(collectives=4, unmatched=0, ranks=ranks, straggler=straggler)
    shown = " ".join(text(report(ranks=(report(rank=0), report(rank=1)), job=job)).split())
    late = "rank 1 joins last, and the others wait 12.3 ms for it" in shown
    assert late is (straggler is not None)
    assert "4 collectives matched" in shown
    assert "exposed communication by rank, ms: 0: 3.2, 1: 3.2" in shown
