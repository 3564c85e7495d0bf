"""Every call that waits, and none that does not."""

from pathlib import Path

from recordings import PAGEABLE, Recording, training
from torchtrim.traces.analysis import analyse
from torchtrim.traces.waiting import find_waits, unexplained_copies


def test_operators_that_look_dangerous_and_did_not_wait(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 5, kernel=(10, 50))
    for n, name in enumerate(("aten::item", "aten::nonzero", "aten::_unique2", "aten::to")):
        made.op(name, 20 + 10 * n, 8)
    assert find_waits(made.trace(tmp_path)) == []


def test_pageable_and_pinned_copies(tmp_path: Path) -> None:
    made = Recording()
    for n, name in enumerate(
        (PAGEABLE, "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)")
    ):
        made.launch(n * 100, 20, kernel=(n * 100 + 5, 10), call="cudaMemcpyAsync", name=name)
    made.launch(
        400, 20, kernel=(405, 10), call="hipMemcpyWithStream", name="Memcpy DtoH (Device -> Host)"
    )
    made.launch(500, 20, kernel=(505, 10), call="cudaMemcpy", name="Memcpy DtoD (Device -> Device)")
    made.activity(PAGEABLE, 600, 5, 999)
    trace = made.trace(tmp_path)
    waits = find_waits(trace)
    assert [(w.kind, w.is_sync, w.is_pageable) for w in waits] == [
        ("other", False, True),
        ("copy", True, False),
    ]
    assert unexplained_copies(trace) == 1


def test_the_profilers_own(tmp_path: Path) -> None:
    made = training(2)
    end = max(event["ts"] + event["dur"] for event in made.events) - 1_700_000_000_000.0
    made.call("cudaDeviceSynchronize", end + 10, 5)
    waits = find_waits(made.trace(tmp_path))
    assert [w.is_profiler for w in waits if w.is_device] == [True]
    made.frame("torch/profiler/profiler.py(235): stop_trace", 50, 30)
    made.call("cudaStreamSynchronize", 60, 5)
    assert sum(w.is_profiler for w in find_waits(made.trace(tmp_path))) == 2


def test_a_program_that_synchronizes_itself(tmp_path: Path) -> None:
    made = training(2)
    made.frame("train.py(3): main", 0, 1e5)
    made.call("cudaDeviceSynchronize", 9e4, 5)
    device = [w for w in find_waits(made.trace(tmp_path)) if w.is_device]
    assert [w.is_profiler for w in device] == [False]


def test_a_rocm_copy_is_what_was_asked_for_and_not_what_its_label_says(tmp_path: Path) -> None:
    made = Recording()
    for at, (kind, label) in enumerate(
        [
            ("2", "Memcpy DtoD (Device -> Device)"),
            ("1", "Memcpy DtoD (Device -> Device)"),
            ("3", "Memcpy DtoH (Device -> Host)"),
        ]
    ):
        ts = 100.0 * at
        number = made.call("hipMemcpyWithStream", ts, 20)
        made.events[-1]["args"]["kind"] = kind
        made.activity(label, ts + 5, 10, number)
    made.call("hipMemcpyWithStream", 400, 20)
    made.events[-1]["args"]["kind"] = 3
    assert [wait.call.ts for wait in find_waits(made.trace(tmp_path))] == [0.0, 100.0]


def test_calls_of_a_trace_without_kernels_are_counted(tmp_path: Path) -> None:
    made = Recording()
    made.frame("train.py(3): main", 0, 500)
    for at in (10, 40):
        made.call("cudaStreamSynchronize", at, 5)
    report = analyse(made.trace(tmp_path))
    assert (report.sync_calls, report.replay_ms, report.bound) == (2, None, "unknown")
    assert "no device activities" in " ".join(report.notes)
