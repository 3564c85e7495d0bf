"""Traces of several ranks on one clock."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from recordings import Recording
from torchtrim.records.trace import Event, Trace
from torchtrim.traces.ranks import covered, device_busy, job_of, loading, talk_of
from torchtrim.traces.reader import read_trace
from torchtrim.workflows.trace import diagnose_traces

STEP, COMPUTE, REDUCE = 10_000.0, 4_000.0, 1_000.0


def job(folder: Path, lates: list[list[float]], clocks: list[float], **named: Any) -> list[Trace]:
    """A rank for each list: in each step it computes, so much longer, then all reduce together."""
    found = []
    for rank, (late, clock) in enumerate(zip(lates, clocks, strict=True)):
        made = Recording(rank=rank)
        for step, more in enumerate(late):
            begin = clock + step * STEP
            end = begin + COMPUTE + max(one[step] for one in lates) + REDUCE
            made.annotation(f"ProfilerStep#{step}", begin, STEP)
            made.launch(begin, 5, kernel=(begin + 10, COMPUTE + more - 10))
            _reduce(made, begin + 20, begin + COMPUTE + more, end, **named)
        folder.joinpath(f"{rank}.json").unlink(missing_ok=True)
        found.append(read_trace(made.write(folder / f"{rank}.json")))
    return found


def _reduce(made: Recording, called: float, begin: float, end: float, group: str = "0") -> None:
    made.launch(
        called, 5, kernel=(begin, end - begin), name="ncclDevKernel_AllReduce_Sum_f32", stream=20
    )
    made.events[-1]["args"] |= {"Collective name": "allreduce", "Process Group Name": group}


def test_the_straggler_and_what_the_others_wait(tmp_path: Path) -> None:
    traces = job(tmp_path, [[0.0, 0.0], [500.0, 700.0], [0.0, 100.0]], [0.0, 0.0, 0.0])
    found = job_of([*map(talk_of, traces)])
    assert found is not None
    assert (found.collectives, found.unmatched, found.straggler) == (2, 0, 1)
    assert [one.waiting_ms for one in found.ranks] == [1.2, 0.0, 1.1]
    assert [one.made_others_wait_ms for one in found.ranks] == [0.0, 2.3, 0.0]
    assert [one.last for one in found.ranks] == [0, 2, 0]
    assert [one.exposed_ms for one in found.ranks] == [3.2, 2.0, 3.1]


def test_clocks_that_differ_change_nothing(tmp_path: Path) -> None:
    lates = [[0.0, 300.0, 0.0], [900.0, 0.0, 800.0]]
    same = job_of([*map(talk_of, job(tmp_path, lates, [0.0, 0.0]))])
    apart = job_of([*map(talk_of, job(tmp_path, lates, [0.0, 123_456.0]))])
    assert same is not None
    assert apart is not None
    assert [one.waiting_ms for one in apart.ranks] == [one.waiting_ms for one in same.ranks]
    assert [one.clock_ms for one in apart.ranks] == [0.0, 123.456]
    assert apart.straggler == same.straggler == 1


def test_ranks_that_come_together_have_no_straggler(tmp_path: Path) -> None:
    chance = random.Random(0)
    lates = [[chance.random() for _ in range(4)] for _ in range(3)]
    found = job_of([*map(talk_of, job(tmp_path, lates, [0.0, 5.0, -7.0]))])
    assert found is not None
    assert found.straggler is None


def test_a_trace_that_begins_a_step_later_is_matched_by_its_steps(tmp_path: Path) -> None:
    lates = [[0.0] * 3, [400.0] * 3]
    one, other = job(tmp_path, lates, [0.0, 0.0])
    other.activities = [event for event in other.activities if event.ts > STEP]
    found = job_of([talk_of(one), talk_of(other)])
    assert found is not None
    assert (found.collectives, found.unmatched, found.straggler) == (2, 1, 1)
    assert found.ranks[0].waiting_ms == 0.8


def test_groups_and_names_that_are_not_shared_are_left_out(tmp_path: Path) -> None:
    here = job(tmp_path, [[0.0], [500.0]], [0.0, 0.0])
    there = job(tmp_path, [[0.0], [500.0]], [0.0, 0.0], group="7")
    assert job_of([talk_of(here[0]), talk_of(there[1])]) is None
    assert job_of([talk_of(here[0])]) is None
    gathered = here[1].activities[-1]
    assert gathered.args is not None
    gathered.args.collective = "allgather"
    assert job_of([*map(talk_of, here)]) is None


def test_ranks_of_a_folder_are_put_together(tmp_path: Path) -> None:
    job(tmp_path, [[0.0, 0.0], [2000.0, 2000.0]], [0.0, 50_000.0])
    report = diagnose_traces([tmp_path])
    assert report.job is not None
    assert report.job.straggler == 1
    assert len(report.ranks) == 2
    alone = diagnose_traces([tmp_path / "0.json"])
    assert alone.job is None


def test_what_overlaps_counts_once() -> None:
    events = [Event(ts=5, dur=10), Event(ts=0, dur=6), Event(ts=30, dur=1), Event(ts=7, dur=2)]
    assert covered(events) == 16
    assert covered([]) == 0


def test_streams_and_the_loader(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 5, kernel=(10, 100))
    made.launch(6, 5, kernel=(50, 100), stream=20)
    made.op("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 200, 40)
    trace = made.trace(tmp_path)
    assert round(device_busy(trace)) == 140
    assert round(loading(trace)) == 40
