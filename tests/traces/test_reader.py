"""Files -> traces: every event in its place and on one clock, whatever the file does."""

import contextlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import draws
from recordings import Recording, training
from torchtrim.errors import TorchtrimError, UnreadableInput, Unsupported
from torchtrim.traces.analysis import analyse
from torchtrim.traces.reader import read_trace


def test_events_are_sorted_into_host_and_device(tmp_path: Path) -> None:
    made = training(2)
    made.event("cuda_sync", "Stream Sync", 5, 1, pid=0, tid=7, stream=7)
    made.rank = 3
    trace = made.trace(tmp_path)
    assert len(trace.activities) == 22
    assert len(trace.calls) == 24
    assert (len(trace.operators), len(trace.annotations), len(trace.frames)) == (4, 2, 2)
    assert len(trace.waits) == 1
    assert trace.device == "NVIDIA H100"
    assert trace.rank == 3
    assert trace.activities[0].ts == pytest.approx(8, abs=0.01)


def test_old_names(tmp_path: Path) -> None:
    made = training(1)
    new = made.trace(tmp_path)
    old = {
        "cpu_op": "Operator",
        "cuda_runtime": "Runtime",
        "kernel": "Kernel",
        "gpu_memcpy": "Memcpy",
    }
    for event in made.events:
        event["cat"] = old.get(event["cat"], event["cat"])
        if event["cat"] in ("Kernel", "Memcpy"):
            event["tid"] = "stream 7"
    assert len(made.trace(tmp_path).activities) == len(new.activities)
    assert analyse(made.trace(tmp_path)).span_ms == analyse(new).span_ms


def test_the_order_of_events_does_not_matter(tmp_path: Path) -> None:
    made = training(3)
    before = analyse(made.trace(tmp_path))
    random.Random(0).shuffle(made.events)
    assert analyse(made.trace(tmp_path)) == before


def test_arrows_in_place_of_numbers(tmp_path: Path) -> None:
    made = training(2)
    before = analyse(made.trace(tmp_path))
    arrows = []
    for event in made.events:
        number = event["args"].pop("correlation", None)
        if number is not None:
            ph = "s" if event["cat"] == "cuda_runtime" else "f"
            arrow = {"ph": ph, "id": number, "cat": "ac2g", "name": "ac2g"}
            arrows.append({**arrow, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"]})
    made.events += arrows
    assert analyse(made.trace(tmp_path)) == before


def test_times_that_cannot_be(tmp_path: Path) -> None:
    made = training(2)
    made.event("kernel", "early", -2e12, 5, pid=0, tid=7)
    made.event("cpu_op", "aten::add", 3, -50)
    made.event("kernel", "long", 3, 1e12, pid=0, tid=7)
    trace = made.trace(tmp_path)
    assert "2 events lie more than a day" in trace.notes[0]
    assert "1 events have a negative duration" in trace.notes[1]
    assert trace.ended() < 1e5


def test_no_device(tmp_path: Path) -> None:
    made = Recording()
    made.op("aten::add", 0, 10)
    with pytest.raises(Unsupported, match=r"none of a device.*ProfilerActivity\.CUDA"):
        made.trace(tmp_path)
    with pytest.raises(UnreadableInput, match="no events"):
        Recording().trace(tmp_path)


def test_what_a_trace_says_about_itself(tmp_path: Path) -> None:
    document = training(1).document()
    document["distributedInfo"] = ["no"]
    document["deviceProperties"] = [{"id": 1, "name": "B"}, 7, {"id": 0, "name": "A" * 999}]
    document["metadata"] = {"system": {"pip_packages": ["torch==2.6.0", 3, "numpy==1"]}}
    document["hip_runtime_version"] = 60443483
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    trace = read_trace(path)
    assert trace.rank is None
    assert trace.device == "A" * 200
    assert trace.versions == {"hip_runtime_version": "60443483", "torch": "2.6.0"}


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)
)
_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id")
_ARGS = ("correlation", "stream", "device", "Sequence number", "Fwd thread id", "Call stack")


@settings(max_examples=draws.count(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(_FIELDS), _JUNK), max_size=6),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(_ARGS), _JUNK), max_size=6),
)
def test_any_damage_is_an_error_or_a_report(
    tmp_path: Path, fields: list[tuple[int, str, object]], args: list[tuple[int, str, object]]
) -> None:
    made = training(2)
    for where, name, junk in args:
        made.events[where % len(made.events)]["args"][name] = junk
    for where, name, junk in fields:
        made.events[where % len(made.events)][name] = junk
    path = tmp_path / "t.json"
    path.write_bytes(json.dumps(made.document()).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(TorchtrimError):
        assert analyse(read_trace(path)).span_ms >= 0
