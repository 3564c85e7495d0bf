"""The state of a stream: a mapping whose fields have lifetimes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtrim.errors import UsageError
from torchtrim.stream.frames import Heads
from torchtrim.stream.lifetimes import Lifetime, bounded, is_unbounded
from torchtrim.stream.policies import Policy
from torchtrim.stream.slots import Slot, Slots
from torchtrim.stream.spill import Spill
from torchtrim.stream.storages import Accounts, flat_bytes, map_tensors
from torchtrim.stream.tombstones import Evicted, Key, Tombstone, split

REMEMBERED = 256  # Arbitrary: evicted entries that an error can still describe in full.


class _SharedEntries:
    """Persistent entries shared by all streams of one model."""

    def __init__(self) -> None:
        self.values: dict[Key, Any] = {}
        self.accounts = Accounts()
        self.ids: dict[Key, tuple[int, ...]] = {}
        self.lock = threading.RLock()

    def put(self, key: Key, value: Any) -> None:
        with self.lock:
            self.drop(key)
            self.values[key] = value
            self.ids[key] = self.accounts.add(key, value)

    def drop(self, key: Key) -> None:
        with self.lock:
            if key in self.values:
                self.accounts.remove(key, self.ids.pop(key))
                del self.values[key]


class StateStore(MutableMapping[Any, Any]):
    """State of one stream, bounded by the lifetimes of its fields.

    `store["pointer", 7] = value` writes a field's entry of frame 7, `store["pointer", (2, 7)]` the entry of
    object 2: the frame is the last part. `store["rope"]` is for entries without a frame. Values can be of
    any type. Their bytes are the storages of their tensors, in lists, tuples and dicts of any depth, each
    storage counted once. Sparse tensors count as zero.

    `step(frame)` or `advance(frame)` sets the current frame. When a frame ends, entries beyond their
    lifetime are evicted: every `every` frames, or only by `retire()` if it is 0. Reading an evicted entry
    raises `Evicted`, a `KeyError` with its `Tombstone`; for `get` and `in` it is absent. The newest
    `remember` tombstones are kept in full, older ones as ranges.

    `budget` limits the bytes of all entries except persistent ones. Above it, entries leave in the order of
    `policy`, or oldest first: they are spilled if `spill` is given (pinned ones last), else evicted. If the
    entries that must stay exceed the budget, writing raises `OverBudget` and changes nothing. `compact`
    copies the survivors when an entry that shares their storage is evicted, so that its bytes are freed.

    Methods are thread-safe; a stream is at one frame at a time.
    """

    def __init__(
        self,
        fields: Mapping[str, Lifetime],
        *,
        budget: int | None = None,
        policy: Policy | None = None,
        spill: Spill | None = None,
        follow: nn.Module | None = None,
        every: int = 1,
        remember: int = REMEMBERED,
        compact: bool = True,
        shared: StateStore | None = None,
    ) -> None:
        _check(fields, budget, every)
        self.fields = dict(fields)
        self.every = every
        self._follow = follow
        self._lock = threading.RLock()
        self._values: dict[Key, Any] = {}
        self._heads = Heads(max((life.frames or 0 for life in fields.values()), default=0))
        self._slots = Slots(self.fields, budget, policy, spill, remember=remember, compact=compact)
        self._shared: _SharedEntries = _SharedEntries() if shared is None else shared._shared
        self._open = False
        self._serial = 0
        self._ended = 0
        bounded.add("StateStore")

    def stream(self, **options: Any) -> StateStore:
        """Return a store for another stream that shares only the fields and persistent entries.

        Takes the options of the constructor.
        """
        return StateStore(self.fields, shared=self, **{"follow": self._follow, **options})

    def __setitem__(self, key: Any, value: Any) -> None:
        key = _normal(key)
        lifetime = self._lifetime(key)
        with self._lock:
            if lifetime.kind == "persistent":
                self._shared.put(key, value)
                return
            old = self._values.get(key)
            was = key in self._values or self._slots.find(key) is not None
            if was and old is None:
                self.recall(key)
                old = self._values.get(key)
            self._values[key] = value
            self._adopt(key, self._values, key, value)
            try:
                self._fit(key)
            except BaseException:
                self._slots.discard(key)
                if was:
                    self._values[key] = old
                    self._adopt(key, self._values, key, old)
                raise

    def __getitem__(self, key: Any) -> Any:
        key = _normal(key)
        with self._lock:
            if self._lifetime(key).kind == "persistent":
                return self._persistent(key)
            slot = self._slots.find(key)
            if slot is None:
                raise self._missing(key)
            if slot.parked is not None:
                self._slots.recall(slot)
            value = slot.holder[slot.name]
            if self._slots.policy is not None:
                self._slots.policy.on_read(key)
            reads = slot.lifetime.reads
            if reads is not None:
                slot.reads += 1
                if slot.reads >= reads and not is_unbounded():
                    self._slots.evict([slot], self.now, f"its {reads} reads were over")
            return value

    def __delitem__(self, key: Any) -> None:
        key = _normal(key)
        with self._lock:
            if self._lifetime(key).kind == "persistent":
                if key not in self._shared.values:
                    raise KeyError(key)
                self._shared.drop(key)
                return
            slot = self._slots.find(key)
            if slot is None:
                raise self._missing(key)
            self._slots.evict([slot], self.now, "it was deleted")

    def __contains__(self, key: object) -> bool:
        key = _normal(key)
        return key in self._shared.values or self._slots.find(key) is not None

    def __iter__(self) -> Iterator[Any]:
        with self._lock:
            keys = [*self._shared.values, *self._slots.keys()]
        return iter([key[0] if key[1] is None else key for key in keys])

    def __len__(self) -> int:
        return len(self._shared.values) + len(self._slots)

    def adopt(self, key: Any, holder: dict[Any, Any], name: Hashable) -> None:
        """Manage `holder[name]`, a value in another dict, as the entry `key`.

        When its lifetime ends, it is deleted from that dict. The budget is applied at the end of the frame.
        With `spill`, the holder must call `recall(key)` for entries that it misses.
        """
        key = _normal(key)
        self._lifetime(key)
        with self._lock:
            self._adopt(key, holder, name, holder[name])

    def evict(self, key: Any, why: str) -> None:
        """Evict an entry, if present, with a tombstone that gives the reason."""
        with self._lock:
            slot = self._slots.find(_normal(key))
            if slot is not None and not is_unbounded():
                self._slots.evict([slot], self.now, why)

    def forget(self, key: Any) -> None:
        """Stop managing an adopted entry. Its value stays in its holder, restored if spilled."""
        with self._lock:
            self.recall(key)
            slot = self._slots.find(_normal(key))
            if slot is not None:
                self._slots.forget(slot)

    def recall(self, key: Any) -> bool:
        """Restore a spilled entry to its holder. Returns False if it is not spilled."""
        with self._lock:
            slot = self._slots.find(_normal(key))
            if slot is None or slot.parked is None:
                return False
            self._slots.recall(slot)
            return True

    @contextmanager
    def step(self, frame: int) -> Iterator[StateStore]:
        """Set the current frame for the block, however it ends.

        Raises `UsageError` inside another step.
        """
        with self._lock:
            if self._open:
                raise UsageError(
                    f"frame {frame} started while this stream is still in frame {self.now}. A store serves "
                    "one stream: create one for each with store.stream()."
                )
            self._begin(frame)
        try:
            yield self
        except BaseException:
            self._close()
            raise
        self.end()

    def advance(self, frame: int) -> None:
        """End the current frame, if any, and start another. For loops without `with`."""
        with self._lock:
            if self._open:
                self.end()
            self._begin(frame)

    def end(self) -> None:
        """End the frame: evict what is due and apply the budget."""
        with self._lock:
            self._close()
            self._fit()

    def retire(self) -> int:
        """Evict all entries whose lifetime is over. Returns the bytes freed."""
        if is_unbounded():
            return 0
        with self._lock:
            before = self._slots.accounts.bytes
            for name, reason, due in self._due():
                self._slots.evict(due, self.now, f"{name} is {reason}", compact=False)
            self._slots.compact()
            return before - self._slots.accounts.bytes

    def relieve(self, nbytes: int, *, lose: bool = False) -> int:
        """Free at least `nbytes` if possible: evict what is due, then spill in the policy's order.

        Entries that may still be read are evicted only with `lose` and without a spill. Returns the bytes
        freed. Raises `SpillFailed`.
        """
        with self._lock:
            freed = self.retire()
            if freed < nbytes and (lose or self.spills) and not is_unbounded():
                freed += self._slots.free(nbytes - freed, self.now)
            return freed

    def drop(self, series: tuple[Hashable, ...]) -> None:
        """Remove all entries and tombstones of a series, such as `("mug",)`."""
        with self._lock:
            keys = self._slots.keys()
            for key in keys:
                if split(key[1])[0] == series:
                    self._slots.discard(key)
            self._slots.graves.forget(series)

    def anchors(self, frames: Iterable[int]) -> None:
        """Replace the set of frames that the stream may return to."""
        with self._lock:
            self._heads.anchors = set(frames)

    def anchor(self, frame: int) -> None:
        """Keep the entries within a window of this frame: the stream may return to it at any time."""
        with self._lock:
            self._heads.anchors.add(frame)

    def reset(self) -> None:
        """Remove all entries except persistent ones, and all tombstones."""
        with self._lock:
            self._slots.clear()
            frame = self.now
            self._heads.clear()
            if self._open and frame is not None:
                self._heads.move(frame)

    def to(self, device: torch.device | str) -> None:
        """Move all entries to a device. Entries that share a storage still share it there."""
        with self._lock:
            moved: dict[int, torch.UntypedStorage] = {}
            follow = _mover(torch.device(device), moved)
            for key in list(self._shared.values):
                self._shared.put(key, map_tensors(self._shared.values[key], follow))
            self._slots.change(follow)

    def tombstone(self, key: Any) -> Tombstone | None:
        """Return the tombstone of an evicted entry, or `None`."""
        return self._slots.graves.find(_normal(key))

    def tombstones(self) -> list[Tombstone]:
        """Return the newest tombstones, oldest first, at most `remember`."""
        return self._slots.graves.recent()

    @property
    def now(self) -> int | None:
        """The current frame, or `None` before the first."""
        return self._heads.now

    @property
    def bytes(self) -> int:
        """Bytes in memory that this stream's own entries keep alive, each storage counted once."""
        return self._slots.accounts.bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the persistent entries. A storage shared with an own entry is also counted in `bytes`."""
        return self._shared.accounts.bytes

    @property
    def spills(self) -> bool:
        """True if the store can spill."""
        return self._slots.parking is not None

    @property
    def spilled_bytes(self) -> int:
        """Bytes spilled now."""
        parking = self._slots.parking
        return 0 if parking is None else parking.bytes

    @property
    def bookkeeping(self) -> int:
        """Number of tombstones and ranges of tombstones. Bounded."""
        return len(self._slots.graves)

    def _close(self) -> None:
        with self._lock:
            self._open = False
            self._ended += 1
            if self.every and self._ended % self.every == 0:
                self.retire()

    def _fit(self, keep: Key | None = None) -> None:
        if not is_unbounded():
            self._slots.fit(self.now, keep)

    def _begin(self, frame: int) -> None:
        self._heads.move(frame)
        self._open = True
        self._serial += 1

    def _due(self) -> Iterator[tuple[str, str, list[Slot]]]:
        for name, lifetime in self.fields.items():
            if lifetime.kind == "volatile":
                table = self._slots.table(name)
                due = [slot for slot in table if not self._open or slot.born < self._serial]
                if due:
                    yield name, "volatile and its frame ended", due
        now, distance = self._heads.only, self._heads.distance
        for name, lifetime in self.fields.items():
            table, frames = self._slots.table(name), lifetime.frames
            if frames is None:
                continue
            if now is None:
                due = [slot for slot in table if distance(slot.frame) > frames]
            else:
                low, high = now - frames, now + frames
                due = [slot for slot in table if not low <= slot.frame <= high]
            if due:
                yield name, f"{lifetime} and the stream moved further away", due

    def _adopt(self, key: Key, holder: dict[Any, Any], name: Hashable, value: Any) -> None:
        lifetime = self.fields[key[0]]
        frame = split(key[1])[1]
        if frame is None and lifetime.kind == "window":
            raise UsageError(
                f"{key!r} has no frame, and {key[0]!r} is {lifetime}, which counts frames. Write "
                f"store[{key[0]!r}, 7], or store[{key[0]!r}, (name, 7)]."
            )
        self._slots.put(Slot(key, lifetime, frame or 0, holder, name, self._serial), value)

    def _persistent(self, key: Key) -> Any:
        if key not in self._shared.values:
            raise KeyError(key)
        value = self._shared.values[key]
        where = next(self._follow.parameters(), None) if self._follow is not None else None
        if where is not None:
            value = map_tensors(value, _mover(where.device, {}))
            self._shared.put(key, value)
        return value

    def _lifetime(self, key: Key) -> Lifetime:
        lifetime = self.fields.get(key[0])
        if lifetime is None:
            raise UsageError(
                f"this store has no field {key[0]!r}; it has {', '.join(map(repr, self.fields))}. "
                f"Declare it: StateStore({{{key[0]!r}: window(15), ...}})."
            )
        return lifetime

    def _missing(self, key: Key) -> KeyError:
        if tombstone := self._slots.graves.find(key):
            return Evicted(tombstone)
        return KeyError(key if key[1] is not None else key[0])


def _normal(key: Any) -> Key:
    if isinstance(key, str):
        return key, None
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str):
        return key
    raise UsageError(
        f"invalid key {key!r} for a state store: use store['field', frame] or store['field']."
    )


def _check(fields: Mapping[str, Lifetime], budget: int | None, every: int) -> None:
    for name, lifetime in fields.items():
        if not isinstance(lifetime, Lifetime):
            raise UsageError(
                f"field {name!r} is declared as {lifetime!r}; use window(15), volatile(), pinned(), "
                "until_read(1) or persistent()."
            )
    if budget is not None and budget <= 0:
        raise UsageError(f"budget={budget}: give a number of bytes above zero, or None.")
    if every < 0:
        raise UsageError(
            f"every={every}: give the number of frames between evictions, or 0 for never."
        )


def _mover(
    device: torch.device, moved: dict[int, torch.UntypedStorage]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        storage = tensor.untyped_storage()
        there = moved.get(storage._cdata)
        if there is None:
            there = moved[storage._cdata] = flat_bytes(tensor).to(device).untyped_storage()
        with torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype, device=device)
            return empty.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())

    return move
