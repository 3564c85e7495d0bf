"""Files -> traces: every event in its place and on one clock, whatever the file does."""

import contextlib
import gzip
import json
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import draws
from recordings import Recording, training
from torchtrim.errors import TorchtrimError, UnreadableInput, Unsupported, UsageError
from torchtrim.traces import reader as source
from torchtrim.traces.analysis import analyse
from torchtrim.traces.reader import MOST_FILES, decode, find_traces, read_bytes, read_trace


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
    assert "2 events are more than a day" in trace.notes[0]
    assert "1 events have a negative duration" in trace.notes[1]
    assert trace.ended() < 1e5


def test_no_device(tmp_path: Path) -> None:
    made = Recording()
    made.op("aten::add", 0, 10)
    with pytest.raises(Unsupported, match=r"no device activities.*ProfilerActivity\.CUDA"):
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


def test_files_and_folders(tmp_path: Path) -> None:
    deep = tmp_path / "plugins" / "profile"
    deep.mkdir(parents=True)
    for name in ("b.pt.trace.json", "a.pt.trace.json.gz", "other.json", "notes.txt"):
        (deep / name).write_text("{}")
    assert [p.name for p in find_traces([tmp_path])] == ["a.pt.trace.json.gz", "b.pt.trace.json"]
    single = deep / "other.json"
    assert find_traces([single, single]) == [single]
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "x.json").write_text("{}")
    assert find_traces([plain]) == [plain / "x.json"]


def test_none_and_too_many(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no trace"):
        find_traces([tmp_path])
    with pytest.raises(UsageError, match=f"at most {MOST_FILES}"):
        find_traces([tmp_path / f"{n}.json" for n in range(MOST_FILES + 1)])


GOOD = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}


def decoded(document: object) -> tuple[int, list[str]]:
    found = decode(json.dumps(document).encode(), "t.json")
    return len(found.events), found.notes


def test_old_and_new_forms() -> None:
    assert decoded([GOOD, GOOD]) == (2, [])
    assert decoded({"traceEvents": [GOOD]}) == (1, [])
    found = decode(json.dumps({"traceEvents": [GOOD], "cuda_runtime_version": 12040}).encode(), "t")
    assert found.meta.versions == {"cuda_runtime_version": 12040}


@pytest.mark.parametrize(
    "bad",
    [
        {**GOOD, "ts": "soon"},
        {**GOOD, "dur": [1]},
        {**GOOD, "name": 3},
        {**GOOD, "args": {"correlation": {"a": 1}}},
        {**GOOD, "ts": None},
        7,
        None,
        [],
    ],
)
def test_wrong_types_are_left_out_and_said(bad: object) -> None:
    count, notes = decoded({"traceEvents": [GOOD, bad, GOOD]})
    assert count == 2
    assert len(notes) == 1
    assert "1 of 3 events" in notes[0]


def test_numbers_that_json_does_not_have() -> None:
    text = '{"traceEvents": [{"ph": "X", "name": "NaN inf", "cat": "kernel", "args": {"x": NaN, '
    text += '"bytes": -Infinity}, "ts": 1, "dur": 2}]}'
    found = decode(text.encode(), "t.json")
    assert found.events[0].name == "NaN inf"
    assert "NaN or infinity" in found.notes[0]


def test_huge_numbers() -> None:
    huge = {**GOOD, "args": {"correlation": 123456789012345678901234567890}}
    count, notes = decoded([GOOD, huge])
    assert (count, notes) == (2, [])
    beyond = json.dumps([GOOD, {**GOOD, "ts": 7777}]).replace("7777", "1e400").encode()
    found = decode(beyond, "t")
    assert len(found.events) == 1
    assert "1 of 2 events" in found.notes[0]


@pytest.mark.parametrize("bare", [True, False])
def test_a_file_that_ends_in_the_middle(bare: bool) -> None:
    events = [{**GOOD, "args": {"stream": n}} for n in range(20)]
    text = json.dumps(events if bare else {"schemaVersion": 1, "traceEvents": events}).encode()
    found = decode(text[: len(text) * 3 // 4], "t.json")
    assert 10 <= len(found.events) < 20
    assert "cut off" in found.notes[0]
    assert str(len(found.events)) in found.notes[0]


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"traceEvents": ' + b"[" * 100_000,
        b'{"traceEvents": [{"args": {"x": ' + b'{"a":' * 100_000,
        b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b', "traceEvents": []}',
        b"\xff\xfe\x00",
        b'{"a": 1}',
        b"12",
        b'"text"',
        b'{"traceEvents": 3}',
        b'{"traceEvents": [{"ph"',
    ],
)
def test_what_is_no_trace(data: bytes) -> None:
    with pytest.raises(UnreadableInput, match=r"not a readable|nested too deeply"):
        decode(data, "t.json")


def test_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.json.gz", tmp_path / "b.json"
    plain.write_bytes(b"{}")
    packed.write_bytes(gzip.compress(b"[1]", mtime=0) + gzip.compress(b"[2]"))
    assert read_bytes(plain) == b"{}"
    assert read_bytes(packed) == b"[1][2]"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (gzip.compress(b"x" * 10_000, mtime=0)[:40], "cut off"),
        (gzip.compress(bytes(range(256)) * 40, mtime=0)[:-8] + b"\xff" * 8, "is damaged"),
        (b"\x1f\x8b" + b"nonsense" * 9, "is damaged"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(data)
    with pytest.raises(UnreadableInput, match=says) as error:
        read_bytes(path)
    assert str(path) in str(error.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none.json", "cannot read"), (tmp_path, "is not a file")):
        with pytest.raises(UnreadableInput, match=says):
            read_bytes(path)


def test_a_limit_on_what_unpacks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"ab" * 600, mtime=0))
    assert len(read_bytes(path, 1200)) == 1200
    with pytest.raises(UnreadableInput, match=r"more than 1199 bytes.*active=1"):
        read_bytes(path, 1199)


def test_ten_gigabytes_of_brackets_stop_early(tmp_path: Path) -> None:
    """What shrinks a thousand times is refused long before the limit on size."""
    packer = zlib.compressobj(wbits=31)
    block = b"[" * 2**20
    path = tmp_path / "bomb.json.gz"
    with path.open("wb") as file:
        for _ in range(10_000 // 40):
            file.write(packer.compress(block))
        file.write(packer.flush())
    with pytest.raises(UnreadableInput, match="250 times its size"):
        read_bytes(path, 2**30)
    assert source._RATIO_FROM < 250 * 2**20
