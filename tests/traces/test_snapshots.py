"""Memory snapshots: read without running anything, replayed to the byte, explained."""

from __future__ import annotations

import pickle
import pickletools
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.snapshots import MIB, Writer, leave_holes

from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.memory.caching import CachingAllocator, DeviceFull
from torchtrim.memory.settings import AllocatorSettings, parse_settings
from torchtrim.records.snapshot import Frame, Snapshot
from torchtrim.traces.snapshots.holders import place_of
from torchtrim.traces.snapshots.pickled import load_plain
from torchtrim.traces.snapshots.reader import read_snapshot
from torchtrim.traces.snapshots.recording import Recording, recordings
from torchtrim.traces.snapshots.replay import Replay
from torchtrim.traces.snapshots.story import analyse_snapshot

INTEGERS = st.integers(-(2**63), 2**64)  # Longer ones are refused.
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.text() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text() | INTEGERS, inner)
    ),
    max_leaves=30,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_data_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol), "it") == value


def test_shared_values_stay_shared() -> None:
    frames = [{"name": "f"}]
    read = load_plain(pickle.dumps([frames, frames]), "it")
    assert read[0] is read[1]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@pytest.mark.parametrize("value", [Evil(), {"segments": Evil()}, Path(), ValueError, 1j, {1, 2}])
def test_objects_are_refused_and_not_created(
    value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnreadableInput, match=r"Nothing of it was run|unknown"):
        load_plain(pickle.dumps(value), "it")
    assert capsys.readouterr().out == ""


@given(PLAIN, st.data())
def test_a_cut_or_changed_file_is_an_error_or_plain_data(value: Any, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(value, 4))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(UnreadableInput):
        load_plain(bytes(whole), "it")


@pytest.mark.parametrize(
    "body",
    [
        b"\x8d" + b"\xff" * 8,  # A text of 2**64 - 1 bytes.
        b"\x8b\xff\xff\xff\x7f",  # An integer of two GiB.
        b"(((((.",
        b"h\x07.",
        b"]]e.",
        b"K\x01K\x02s.",
        b"}]K\x01s.",
        b"..",
        b"",
        b"]" * 1000 + b"a" * 999,
    ],
)
def test_hostile_pickles_are_refused(body: bytes) -> None:
    with pytest.raises(UnreadableInput):
        load_plain(b"\x80\x04" + body, "it")


def test_deep_nesting_is_read_without_recursion() -> None:
    deep = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    assert isinstance(load_plain(deep, "it"), list)


def test_every_opcode_that_creates_objects_is_refused() -> None:
    creating = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"}
    creating |= {"PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"}
    for opcode in pickletools.opcodes:
        if opcode.name in creating:
            with pytest.raises(UnreadableInput, match=opcode.name):
                load_plain(b"\x80\x04N" + opcode.code.encode("latin-1") + b".", "it")


def test_what_is_no_snapshot_says_so(tmp_path: Path) -> None:
    file = tmp_path / "it.pickle"
    for value, word in (
        ({"segments": 3}, r"\$.segments"),
        ([], "no memory snapshot"),
        ({"segments": [{"address": "x", "total_size": 1}]}, "address"),
    ):
        file.write_bytes(pickle.dumps(value))
        with pytest.raises(UnreadableInput, match=word):
            read_snapshot(file)
    file.write_bytes(b"")
    with pytest.raises(UnreadableInput, match="empty"):
        read_snapshot(file)
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))
    with pytest.raises(UnreadableInput, match="_record_memory_history"):
        analyse_snapshot(read_snapshot(file), "it")


def test_a_list_that_is_referred_to_often_is_not_copied_without_bound(tmp_path: Path) -> None:
    file = tmp_path / "it.pickle"
    event = {"action": "alloc", "addr": 1, "size": 1, "stream": 0}
    events = [event] * 3000
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [events] * 3000}))
    with pytest.raises(UnreadableInput, match="max_entries"):
        read_snapshot(file)


_EVENT = {"action": "alloc", "addr": 1, "size": 1, "stream": 0}
_WHOLE = {"address": 0, "total_size": 2**40, "is_expandable": True}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device_traces": [[_EVENT | {"size": 2**41}]]}, r"size"),
        ({"device_traces": [[_EVENT | {"addr": 2**63}]]}, r"addr"),
        ({"device_traces": [[_EVENT | {"size": -1}]]}, r"size"),
        ({"segments": [_WHOLE] * 5}, "which no devices have"),
        (
            {"device_traces": [[_EVENT | {"action": "segment_unmap", "size": 2**40}] * 20]},
            "which no devices have",
        ),
    ],
)
def test_memory_that_no_device_has_is_refused(
    change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    """A replay looks at each page of expandable segments."""
    file = tmp_path / "it.pickle"
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [[_EVENT]]} | change))
    with pytest.raises(UnreadableInput, match=word):
        read_snapshot(file)


@pytest.mark.parametrize(
    "actions", [("segment_alloc", "segment_alloc"), ("segment_map", "segment_alloc")]
)
def test_memory_is_not_taken_twice(actions: tuple[str, str]) -> None:
    taken = [_EVENT | {"action": action, "size": 2 * MIB} for action in actions]
    plain = {"segments": [], "device_traces": [[*taken, _EVENT]]}
    with pytest.raises(UnreadableInput, match="takes address 0x1, which it holds"):
        analyse_snapshot(msgspec.convert(plain, Snapshot), "it")
    freed = taken[0] | {"action": actions[0].replace("alloc", "free").replace("_map", "_unmap")}
    plain["device_traces"] = [[taken[0], freed, taken[1], _EVENT]]
    assert analyse_snapshot(msgspec.convert(plain, Snapshot), "it").devices


def test_settings_that_no_process_has_are_not_read(tmp_path: Path) -> None:
    """A text of `laughs` would have 10**9 words; the other takes a pattern the square of its length."""
    laughs: list[Any] = ["x"] * 10
    for _ in range(8):
        laughs = [laughs] * 10
    file = tmp_path / "it.pickle"
    for conf in (laughs, "max_split_size_mb:" + " " * 300_000 + "["):
        plain = {"segments": [], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf}}
        file.write_bytes(pickle.dumps(plain))
        assert read_snapshot(file).conf == ""


def test_of_many_failures_the_first_are_explained() -> None:
    oom = _EVENT | {"action": "oom", "size": 2**30, "device_free": 0}
    plain = {"segments": [], "device_traces": [[_EVENT, *[oom] * 50]]}
    report = analyse_snapshot(msgspec.convert(plain, Snapshot), "it")
    assert len(report.devices[0].ooms) == 20
    assert report.notes == ("Device 0 ran out of memory 50 times: the first 20 are explained.",)


SIZES = st.sampled_from([1, 700, 4096, 200_000, MIB, MIB + 1, 3 * MIB, 12 * MIB, 30 * MIB + 17])
CONFS = st.sampled_from(
    ["", "expandable_segments:True", "max_split_size_mb:21", "roundup_power2_divisions:4"]
)


@given(CONFS, st.lists(SIZES | st.integers(-20, 0), max_size=60), st.integers(0, 40))
def test_a_replay_finds_every_address(conf: str, actions: list[int], since: int) -> None:
    writer = Writer(conf)
    live: list[int] = []
    for action in actions:
        if action > 0:
            live.append(writer.malloc(action))
        elif action == 0:
            writer.empty_cache()
        elif live:
            writer.free(live.pop(action % len(live)))
    snapshot = writer.snapshot(0 if conf.startswith("exp") else min(since, len(writer.events)))
    if not snapshot.segments and not snapshot.device_traces[0]:
        return
    recording = Recording(snapshot, 0)
    replayed = Replay(recording, recording.settings, exact=True).run()
    assert replayed.same == replayed.allocations
    assert replayed.peak_reserved == recording.peak_reserved
    if not conf.startswith("exp"):
        assert replayed.device_calls == recording.device_calls


def test_what_a_snapshot_says() -> None:
    writer = Writer()
    leave_holes(writer)
    (device,) = analyse_snapshot(writer.snapshot(), "it").devices
    assert device.evidence.exact
    assert device.evidence.same == device.evidence.allocations == 8
    assert device.peak_allocated == 132 * MIB  # 11 MiB take all of a segment of 12
    holders = {(one.path, one.line, one.kind): one.bytes for one in device.holders}
    assert holders == {
        ("me/train.py", 3, "other"): 120 * MIB,
        ("me/model.py", 9, "forward"): 11 * MIB,
    }
    assert device.base.peak_reserved == device.peak_reserved
    assert device.slack.rounding == MIB
    assert device.slack.cached + device.slack.split == device.peak_reserved - 126 * MIB
    assert device.best is not None
    assert device.best.conf == "expandable_segments:True"
    assert device.best.peak_reserved < device.peak_reserved
    assert device.arena == 131 * MIB
    assert max(device.curve.allocated) == device.peak_allocated
    assert max(device.curve.reserved) == device.peak_reserved
    sums = [sum(values) for values in zip(*device.curve.kinds.values(), strict=True)]
    whole = zip(sums, device.curve.allocated, strict=True)
    assert all(requested <= used <= requested + MIB for requested, used in whole)


def test_an_out_of_memory_says_what_would_have_made_room() -> None:
    writer = Writer(capacity=140 * MIB)
    blocks = [writer.malloc(30 * MIB) for _ in range(4)]
    others = [writer.malloc(MIB) for _ in range(2)]
    for handle in blocks[::2]:
        writer.free(handle)
    writer.malloc(29 * MIB)
    writer.malloc(29 * MIB)
    for handle in (*blocks[1::2], *others):
        writer.free(handle)
    writer.malloc(25 * MIB)
    with pytest.raises(DeviceFull):
        writer.allocator.malloc(56 * MIB)
    writer._tell("oom", 0, 56 * MIB)
    writer.events[-1]["device_free"] = 140 * MIB - writer.allocator.reserved
    (device,) = analyse_snapshot(writer.snapshot(), "it").devices
    (failure,) = device.ooms
    assert failure.size == 56 * MIB
    assert failure.allocated == 85 * MIB
    assert failure.reserved == failure.allocated + failure.cached


def test_places_and_kinds_of_stacks() -> None:
    torch = "/usr/lib/python3.11/site-packages/torch/"
    linear = Frame(torch + "nn/modules/linear.py", 125, "forward")
    own = Frame("/home/me/proj/model.py", 30, "forward")
    main = Frame("/home/me/proj/train.py", 9, "<module>")
    place = place_of([Frame("", 0, "at::addmm"), linear, own, main])
    assert (place.kind, place.path, place.line) == ("forward", "proj/model.py", 30)
    assert place.by == "nn/modules/linear.py forward"
    assert place.within == ("proj/train.py:9 <module>",)
    adam = Frame(torch + "optim/adam.py", 400, "_init_group")
    assert place_of([adam, main]).kind == "optimizer"
    assert place_of([Frame("", 0, "torch::autograd::Engine::evaluate")]).kind == "backward"
    assert place_of([], before=True).kind == "held before"


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("", 1200, 1536),
        ("roundup_power2_divisions:4", 1200 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:4", 1024, 1024),
        ("roundup_power2_divisions:[64:1,>:2]", 3 * MIB + 1, 3 * MIB + 512),
        ("roundup_power2_divisions:[64:1,>:2]", 129 * MIB, 192 * MIB),
    ],
)
def test_sizes_are_rounded_by_divisions(text: str, size: int, expected: int) -> None:
    assert parse_settings(text).rounded(size) == expected


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:20",
        "max_split_size_mb:x",
        "roundup_power2_divisions:3",
        "garbage_collection_threshold:1.5",
        "max_split:3",
        "expandable_segments",
    ],
)
def test_wrong_settings_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_settings(text)


@given(
    st.builds(
        AllocatorSettings,
        expandable_segments=st.booleans(),
        max_split_size=st.none() | st.integers(21, 999).map(lambda size: size * MIB),
        roundup_divisions=st.just(())
        | st.lists(st.sampled_from([1, 2, 4, 8]), min_size=16, max_size=16).map(tuple),
    )
)
def test_settings_are_written_as_they_are_read(settings: AllocatorSettings) -> None:
    assert parse_settings(settings.words()) == settings


def test_expandable_segments_grow_where_they_are() -> None:
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    first = allocator.malloc(25 * MIB)
    assert allocator.reserved == 40 * MIB
    second = allocator.malloc(30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.free(first)
    allocator.free(second)
    allocator.malloc(58 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_full_device_releases_its_cache_and_then_fails() -> None:
    allocator = CachingAllocator(capacity=50 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(40 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 40 * MIB)
    with pytest.raises(DeviceFull):
        allocator.malloc(20 * MIB)


def test_devices_without_events_are_a_note() -> None:
    writer = Writer()
    writer.malloc(MIB)
    snapshot = writer.snapshot(since=2)
    assert len(recordings(snapshot)) == 1
    report = analyse_snapshot(snapshot, "it")
    assert report.devices == ()
    assert "_record_memory_history" in report.notes[0]
