"""Traces -> reports."""

from pathlib import Path

import msgspec

from recordings import BACKWARD, Recording, training
from torchtrim.records.trace import TraceReport, TraceSite
from torchtrim.traces.analysis import KNOWN_FIXES, analyse, joined, known_fixes


def test_a_loop_that_reads_a_number_each_step(tmp_path: Path) -> None:
    report = analyse(training(4).trace(tmp_path))
    assert (report.sync_calls, report.blocking_copies, report.waits) == (4, 4, 4)
    assert report.replay_ms is not None
    assert abs(report.replay_ms / report.span_ms - 1) < 0.02
    assert report.bound in ("device", "waits")
    assert report.sites[0].path == "train.py"
    assert report.sites[0].wait_ms > 10
    assert report.device_busy_ms <= report.span_ms
    assert msgspec.json.decode(msgspec.json.encode(report), type=TraceReport) == report


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    made = Recording()
    for n in range(5):
        made.activity("gemm", n * 100, 50, 100 + n)
    report = analyse(made.trace(tmp_path))
    assert report.replay_ms is None
    assert report.bound == "unknown"
    assert "cannot be replayed" in report.notes[0]
    made.call("cudaStreamSynchronize", 20, 400)
    report = analyse(made.trace(tmp_path))
    assert report.sync_calls == 1
    assert report.sites[0].saves_alone_ms is None


def test_collectives_and_causes_outside_are_said(tmp_path: Path) -> None:
    made = training(2)
    made.launch(30_000, 5, kernel=(30_010, 9000), name="ncclDevKernel_AllReduce_Sum", stream=20)
    made.launch(40_000, 5, kernel=(60_000, 10))
    notes = " ".join(analyse(made.trace(tmp_path)).notes)
    assert "Collectives run for 9.0 ms" in notes
    assert "no cause in the trace" in notes


def test_a_thread_that_only_polls_is_not_waited_for(tmp_path: Path) -> None:
    made = training(2)
    before = analyse(made.trace(tmp_path)).span_ms
    made.call("cudaEventQuery", 9e5, 3, tid=BACKWARD)
    assert analyse(made.trace(tmp_path)).span_ms == before


def test_several_ranks(tmp_path: Path) -> None:
    short, long = training(1), training(3)
    short.rank, long.rank = 1, 0
    reports = [analyse(made.trace(tmp_path)) for made in (short, long)]
    report = joined(reports)
    assert report.rank == 0
    assert [one.rank for one in report.ranks] == [0, 1]
    assert "2 ranks; shown is the slowest, rank 0" in report.notes[0]
    assert joined(reports[:1]) is reports[0]


def site(path: str, function: str, within: str = "") -> TraceSite:
    return TraceSite(
        path=path,
        function=function,
        line=1,
        op="aten::_local_scalar_dense",
        within=within,
        count=1,
        wait_ms=1.0,
        saves_alone_ms=None,
    )


def test_known_places_are_told_once_with_the_version() -> None:
    path = "diffusers/schedulers/scheduling_flow_match_euler_discrete.py"
    sites = [site(path, "index_for_timestep"), site(path, "index_for_timestep")]
    (note,) = known_fixes(sites, {"diffusers": "0.34.0"})
    assert "diffusers 0.34.0" in note
    assert "set_begin_index" in note
    assert "/pull/11696" in note


def test_operators_and_what_is_unknown() -> None:
    assert "nonzero_static" in known_fixes([site("train.py", "f", "aten::nonzero")], {})[0]
    assert (
        known_fixes([site("train.py", "f"), site("diffusers/x.py", "index_for_timestep")], {}) == []
    )


def test_each_has_a_source() -> None:
    assert all(fix.source.startswith("https://") for fix in KNOWN_FIXES)
    assert all(fix.path or fix.function or fix.within for fix in KNOWN_FIXES)
