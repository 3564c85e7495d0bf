"""The store against an oracle that keeps everything, its bytes against the storages, its errors."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtrim.errors import UsageError
from torchtrim.stream import (
    Cheapest,
    Evicted,
    Largest,
    LeastRead,
    LeastRecent,
    Lifetime,
    Oldest,
    OverBudget,
    Policy,
    StateStore,
    held_bytes,
    persistent,
    pinned,
    until_read,
    volatile,
    window,
)

FIELDS = {
    "pointer": window(3),
    "memory": window(1),
    "image": volatile(),
    "prompt": pinned(),
    "logits": until_read(2, within=4),
    "rope": persistent(),
}
WRITES = st.lists(st.sampled_from(["pointer", "memory", "image", "prompt", "logits"]), max_size=4)
STEPS = st.lists(st.tuples(st.integers(-2, 3), WRITES), min_size=1, max_size=25)


class Oracle:
    """Keeps every entry for ever, and tells from the definition which of them must be readable."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], float] = {}
        self.gone: set[tuple[str, int]] = set()

    def write(self, key: tuple[str, int], value: float) -> None:
        self.written[key] = value
        self.gone.discard(key)

    def end(self, now: int) -> None:
        for field, frame in self.written:
            lifetime = FIELDS[field]
            far = lifetime.frames is not None and abs(frame - now) > lifetime.frames
            if far or lifetime.kind == "volatile":
                self.gone.add((field, frame))

    def alive(self) -> dict[tuple[str, int], float]:
        return {key: value for key, value in self.written.items() if key not in self.gone}


def plain(store: StateStore) -> dict[Any, float]:
    return {key: float(store._values[key][0]) for key in store}


@given(STEPS)
def test_what_is_there_is_what_the_oracle_says(steps: list[tuple[int, list[str]]]) -> None:
    store, oracle, now = StateStore(FIELDS), Oracle(), 0
    for number, (move, writes) in enumerate(steps):
        now += move
        with store.step(now):
            for field in writes:
                store[field, now] = torch.full((4,), float(number))
                oracle.write((field, now), float(number))
        oracle.end(now)
        assert plain(store) == oracle.alive()
        assert store.bytes == held_bytes(store._values.values()) == 16 * len(store)
        for key in oracle.gone:
            tombstone = store.tombstone(key)
            assert tombstone is not None
            assert key not in store
            with pytest.raises(Evicted, match=f"{key[0]!r} of frame {key[1]} was evicted"):
                store[key]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_bytes_are_those_of_the_storages(slices: list[tuple[int, bool]]) -> None:
    store = StateStore({"batch": pinned(), "whole": pinned()}, compact=False)
    batch = torch.arange(48.0).reshape(6, 8)
    for number, (row, whole) in enumerate(slices):
        store["whole" if whole else "batch", number] = (
            [batch] if whole else {"row": batch[row : row + 1]}
        )
        assert store.bytes == held_bytes(store._values.values())
    for key in list(store):
        del store[key]
        assert store.bytes == held_bytes(store._values.values())
    assert store.bytes == 0


def test_a_view_frees_nothing_and_says_so() -> None:
    store = StateStore({"memory": window(0)}, compact=False)
    batch = torch.zeros(2, 8)
    with store.step(0):
        store["memory", ("b", 0)] = batch[1:]
        store["memory", ("a", 1)] = batch[:1]
    tombstone = store.tombstone(("memory", ("a", 1)))
    assert tombstone is not None
    assert tombstone.freed == 0
    assert "It freed nothing: 'memory' of frame 0 of b hold the same storage." in str(tombstone)
    assert store.bytes == 64


@given(st.integers(2, 6), st.integers(1, 5))
def test_evicting_k_of_n_slices_frees_k_nths(n: int, k: int) -> None:
    k = min(k, n)
    store = StateStore({"memory": pinned()})
    batch = torch.arange(n * 8.0).reshape(n, 8)
    for row in range(n):
        store["memory", (row, 0)] = batch[row : row + 1]
    assert store.bytes == n * 32
    for row in range(k):
        del store["memory", (row, 0)]
    assert store.bytes <= (n - k) * 32
    for row in range(k, n):
        assert torch.equal(store["memory", (row, 0)], batch[row : row + 1])


def test_two_reads_and_it_is_gone() -> None:
    store = StateStore(FIELDS)
    with store.step(0):
        store["logits", 0] = 5
    assert [store["logits", 0], store["logits", 0]] == [5, 5]
    with pytest.raises(Evicted, match="its 2 reads were over"):
        store["logits", 0]


def test_streams_share_what_is_persistent_and_nothing_else() -> None:
    one = StateStore(FIELDS)
    other = one.stream()
    one["rope"] = torch.zeros(100)
    one["pointer", 1] = torch.ones(4)
    assert other["rope"] is one["rope"]
    assert ("pointer", 1) not in other
    assert (one.shared_bytes, other.shared_bytes, other.bytes) == (400, 400, 0)
    one.reset()
    assert list(one) == ["rope"]
    assert list(other) == ["rope"]
    del other["rope"]
    with pytest.raises(KeyError, match="rope"):
        one["rope"]


def test_what_is_persistent_follows_the_model() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    store = StateStore(FIELDS, follow=model)
    table = torch.zeros(8)
    store["rope"] = [table, table[:4]]
    moved = store["rope"]
    assert [one.device.type for one in moved] == ["meta", "meta"]
    assert held_bytes([moved]) == 32


def test_moving_keeps_what_is_shared_shared() -> None:
    store = StateStore(FIELDS)
    batch = torch.zeros(4, 8)
    store["prompt", (0, 1)], store["prompt", (1, 1)] = batch[:2], batch[2:]
    store.to("meta")
    assert store.bytes == batch.nbytes
    assert store["prompt", (1, 1)].device.type == "meta"


def test_bookkeeping_is_bounded() -> None:
    store = StateStore({"pointer": window(3)}, remember=10)
    for frame in range(5000):
        with store.step(frame):
            store["pointer", frame] = frame
    assert store.bookkeeping <= 11
    assert len(store.tombstones()) == 10
    with pytest.raises(Evicted, match="was evicted earlier: its lifetime was over"):
        store["pointer", 17]
    assert store.get(("pointer", 17), "none") == "none"
    with pytest.raises(KeyError):
        store["pointer", 6000]


def test_the_budget_takes_in_the_policys_order_and_never_what_is_pinned() -> None:
    store = StateStore({"a": window(100), "p": pinned()}, budget=96)
    store["p", 0] = torch.zeros(8)
    for frame in range(4):
        store["a", frame] = torch.zeros(8)
        assert store.bytes <= 96
    assert list(store) == [("a", 2), ("a", 3), ("p", 0)]
    tombstone = store.tombstone(("a", 0))
    assert tombstone is not None
    assert tombstone.why == "the budget was exceeded"


def test_what_cannot_fit_changes_nothing() -> None:
    store = StateStore({"a": window(100), "p": pinned()}, budget=96)
    store["p", 0], store["a", 1] = torch.zeros(8), torch.ones(8)
    before = plain(store)
    with pytest.raises(OverBudget, match="Nothing was lost"):
        store["p", 1] = torch.zeros(24)
    with pytest.raises(OverBudget, match="budget is 96"):
        store["p", 0] = torch.zeros(64)
    assert plain(store) == before
    assert store.bytes == 64


def test_an_exception_inside_a_frame_leaves_it_consistent() -> None:
    store = StateStore(FIELDS)

    def fail() -> None:
        with store.step(0):
            store["image", 0] = torch.zeros(4)
            store["pointer", 0] = torch.zeros(4)
            raise RuntimeError("bad frame")

    with pytest.raises(RuntimeError, match="bad frame"):
        fail()
    assert list(store) == [("pointer", 0)]
    with store.step(1):
        assert store["pointer", 0].numel() == 4


def test_a_policy_that_fails_loses_nothing() -> None:
    from torchtrim.stream import Oldest

    class Broken(Oldest):
        def order(self, candidates: Any) -> Any:
            raise ValueError("no order")

    store = StateStore({"a": window(9)}, budget=40, policy=Broken())
    store["a", 0] = torch.zeros(8)
    with pytest.raises(ValueError, match="no order"):
        store["a", 1] = torch.zeros(8)
    assert plain(store) == {("a", 0): 0.0}
    assert store.bytes == 32


def test_frames_skipped_and_out_of_order() -> None:
    store = StateStore({"pointer": window(3)})
    for frame in (0, 2, 1, 7, 6, 5):
        with store.step(frame):
            store["pointer", frame] = frame
    assert sorted(store) == [("pointer", frame) for frame in (0, 1, 2, 5, 6, 7)]
    with store.step(30):
        assert store["pointer", 5] == 5
    assert sorted(store) == [("pointer", frame) for frame in (2, 5, 6, 7)]
    with pytest.raises(KeyError):
        store["pointer", 4]


def test_a_reset_in_the_middle_of_a_frame() -> None:
    store = StateStore(FIELDS)
    for frame in range(5):
        with store.step(frame):
            store["pointer", frame] = torch.zeros(4)
            if frame == 3:
                store.reset()
    assert list(store) == [("pointer", 4)]
    assert store.bytes == 16


def test_one_stream_is_at_one_frame() -> None:
    store = StateStore(FIELDS)
    with store.step(1), pytest.raises(UsageError, match="still in frame 1"), store.step(2):
        pass
    store.advance(3)
    store.advance(4)
    store.end()
    assert store.now == 4


def test_threads_may_write_at_once() -> None:
    store = StateStore({"pointer": window(3), "memory": window(0)}, budget=2000)

    def work(name: int) -> None:
        for number in range(200):
            store["memory", (name, number % 3, 0)] = torch.zeros(8)
            store.get(("memory", (name, (number + 1) % 3, 0)))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    with store.step(0):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert store.bytes == held_bytes(store._values.values()) <= 2000
    assert len(store) == 12


def test_adopted_values_go_from_the_dict_they_are_in() -> None:
    store = StateStore({"pointer": window(1)})
    records = {frame: {"pointer": torch.zeros(4), "frame": frame} for frame in range(4)}
    for frame, record in records.items():
        with store.step(frame):
            store.adopt(("pointer", frame), record, "pointer")
    assert ["pointer" in record for record in records.values()] == [False, False, True, True]
    assert store.bytes == 32


@settings(max_examples=30)
@given(st.integers(1, 7))
def test_cleaning_less_often_keeps_more_and_loses_nothing(every: int) -> None:
    store = StateStore({"pointer": window(2)}, every=every)
    for frame in range(30):
        with store.step(frame):
            store["pointer", frame] = frame
        assert {("pointer", f) for f in range(max(0, frame - 2), frame + 1)} <= set(store)
        assert len(store) <= 3 + every


def test_errors_teach() -> None:
    store = StateStore(FIELDS)
    with pytest.raises(UsageError, match="no field 'depth'"):
        store["depth", 1] = 1
    with pytest.raises(UsageError, match="counts frames"):
        store["pointer"] = 1
    with pytest.raises(UsageError, match="invalid key"):
        store[7] = 1
    with pytest.raises(UsageError, match="declared as 15"):
        StateStore({"pointer": 15})  # type: ignore[dict-item]
    for wrong in ({"budget": 0}, {"every": -1}):
        with pytest.raises(UsageError, match="give"):
            StateStore(FIELDS, **wrong)
    for make in (lambda: window(-1), lambda: until_read(0), lambda: window(True)):
        with pytest.raises(UsageError, match="an integer"):
            make()


@pytest.mark.parametrize("lifetime", FIELDS.values())
def test_lifetimes_read_as_they_are_written(lifetime: Lifetime) -> None:
    assert str(lifetime).startswith(lifetime.kind)


SIZES = {0: 8, 1: 24, 2: 16, 3: 8}


@pytest.mark.parametrize(
    ("policy", "goes"),
    [
        (Oldest(), 0),
        (LeastRecent(), 2),
        (LeastRead(), 3),
        (Largest(), 1),
        (Cheapest(lambda key: 1.0 if key[1] == 3 else 100.0), 3),
    ],
)
def test_each_takes_its_own_first(policy: Policy, goes: int) -> None:
    store = StateStore({"a": window(99)}, budget=4 * sum(SIZES.values()), policy=policy)
    for frame, size in SIZES.items():
        store["a", frame] = torch.zeros(size)
    for frame in (2, 2, 1, 1, 0, 0, 3):
        store["a", frame]
    store["a", 9] = torch.zeros(1)
    assert {frame for frame in SIZES if ("a", frame) not in store} == {goes}
    del store["a", 9]
