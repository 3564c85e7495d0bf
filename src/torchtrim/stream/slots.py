"""Entries of a store, in any dict: accounts for their bytes, evicts, spills and restores them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtrim.errors import TorchtrimError
from torchtrim.stream.lifetimes import Lifetime
from torchtrim.stream.policies import Policy
from torchtrim.stream.spill import Spill, SpillFailed
from torchtrim.stream.storages import (
    Accounts,
    Copies,
    Holding,
    flat_bytes,
    leaves_of,
    map_leaves,
    map_tensors,
    storage_id,
    tensors_of,
)
from torchtrim.stream.tombstones import Graveyard, Key, name_of


@dataclass(frozen=True, slots=True)
class Parked:
    """Placeholder of a tensor whose storage is spilled: the storage's number and the layout."""

    blob: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True)
class _Blob:
    token: Any
    nbytes: int
    device: torch.device
    keys: set[Key] = field(default_factory=set)


class Parking:
    """Spilled storages by number, with the entries that need each."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._blobs: dict[int, _Blob] = {}
        self._next = 0
        self.bytes = 0

    def put(self, tensor: torch.Tensor) -> int:
        """Spill the whole storage of a tensor and return its number. Raises `SpillFailed`."""
        flat = flat_bytes(tensor)
        token = self._spill.put(flat)
        number, self._next = self._next, self._next + 1
        self._blobs[number] = _Blob(token, flat.nbytes, tensor.device)
        self.bytes += flat.nbytes
        return number

    def park(self, number: int, storage: int, key: Key, value: Any) -> Any:
        """Return the value with its tensors on that storage replaced by `Parked`."""
        self._blobs[number].keys.add(key)

        def replace(tensor: torch.Tensor) -> Any:
            if storage_id(tensor) != storage:
                return tensor
            size, stride = tuple(map(int, tensor.shape)), tensor.stride()
            return Parked(number, tensor.dtype, int(tensor.storage_offset()), size, stride)

        return map_tensors(value, replace)

    def fetch(self, number: int) -> tuple[torch.UntypedStorage, set[Key]]:
        """Load a storage to its original device. Return it with the entries that need it."""
        blob = self._blobs[number]
        data = self._spill.get(blob.token)
        data = data.to(blob.device, copy=data.device == blob.device)
        self._forget(number)
        return data.untyped_storage(), blob.keys

    def leave(self, key: Key, value: Any) -> None:
        """Release an entry's parked tensors, and drop storages that no entry needs."""
        for number in blobs_of(value):
            keys = self._blobs[number].keys
            keys.discard(key)
            if not keys:
                self._forget(number)

    def _forget(self, number: int) -> None:
        blob = self._blobs.pop(number)
        self.bytes -= blob.nbytes
        self._spill.drop(blob.token)


def blobs_of(value: Any) -> set[int]:
    """Return the numbers of the spilled storages that a value needs."""
    return {leaf.blob for leaf in leaves_of(value) if isinstance(leaf, Parked)}


def unpark(value: Any, number: int, storage: torch.UntypedStorage) -> Any:
    """Return the value with the `Parked` tensors of one storage restored."""

    def restore(leaf: Any) -> Any:
        if not isinstance(leaf, Parked) or leaf.blob != number:
            return leaf
        with torch.no_grad():
            empty = torch.empty(0, dtype=leaf.dtype, device=storage.device)
            return empty.set_(storage, leaf.offset, leaf.size, leaf.stride)

    return map_leaves(value, restore)


class OverBudget(TorchtrimError):
    """Entries that must not be evicted exceed the budget. Nothing was changed or lost."""


@dataclass(slots=True, eq=False)
class Slot:
    """An entry, stored in `holder[name]`. `parked` is its value while spilled."""

    key: Key
    lifetime: Lifetime
    frame: int
    holder: dict[Any, Any]
    name: Hashable
    born: int
    reads: int = 0
    number: int = 0
    storages: tuple[int, ...] = ()
    parked: Any = None


class Slots:
    """All entries of one stream except persistent ones. Not thread-safe: the owner locks."""

    def __init__(
        self,
        fields: Mapping[str, Lifetime],
        budget: int | None,
        policy: Policy | None,
        spill: Spill | None,
        *,
        remember: int,
        compact: bool,
    ) -> None:
        self.policy = policy
        self.accounts = Accounts()
        self.graves = Graveyard(remember)
        self._tables: dict[str, dict[Hashable, Slot]] = {name: {} for name in fields}
        self._budget = budget
        self.parking = Parking(spill) if spill is not None else None
        self._compact = compact
        self._touched: list[Holding] = []
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def keys(self) -> list[Key]:
        """Return the keys of all entries."""
        return [slot.key for slot in self._all()]

    def table(self, field: str) -> Collection[Slot]:
        """Return the entries of a field."""
        return self._tables[field].values()

    def find(self, key: Key) -> Slot | None:
        """Return the entry of a key, spilled or not."""
        return self._tables.get(key[0], {}).get(key[1])

    def put(self, slot: Slot, value: Any) -> None:
        """Add an entry, replacing one of the same key."""
        old = self.find(slot.key)
        if old is not None:
            if old.holder is not slot.holder or old.name != slot.name:
                old.holder.pop(old.name, None)
            self._release(old)
        slot.number = self._number = self._number + 1
        slot.storages = self.accounts.add(slot.key, value)
        self._tables[slot.key[0]][slot.key[1]] = slot
        if self.policy is not None:
            self.policy.on_put(slot.key, sum(tensor.nbytes for tensor in tensors_of(value)))

    def discard(self, key: Key) -> None:
        """Undo a `put`: remove the entry without a tombstone."""
        slot = self.find(key)
        if slot is not None:
            slot.holder.pop(slot.name, None)
            self.forget(slot)

    def forget(self, slot: Slot) -> None:
        """Stop managing an entry; its value stays in its holder."""
        del self._tables[slot.key[0]][slot.key[1]]
        self._release(slot)
        if self.policy is not None:
            self.policy.on_evict(slot.key)

    def evict(self, slots: list[Slot], now: int | None, why: str, *, compact: bool = True) -> None:
        """Evict entries, leaving tombstones. `compact` copies survivors that share their storages."""
        for slot in slots:
            field, entry = slot.key
            del self._tables[field][entry]
            freed, shared = self._release(slot)
            slot.holder.pop(slot.name, None)
            self._touched += shared
            holders = shared[0].keys if shared and not freed else ()
            self.graves.bury(slot.key, now, why, freed, tuple(itertools.islice(holders, 4)))
            if self.policy is not None:
                self.policy.on_evict(slot.key)
        if compact:
            self.compact()

    def compact(self) -> None:
        """Copy the survivors of storages that lost an entry if the copies free bytes and fit in memory."""
        touched, self._touched = self._touched, []
        if not self._compact:
            return
        for holding in {id(h): h for h in touched if h.worth_a_look()}.values():
            slots = [slot for key in holding.keys if (slot := self.find(key)) is not None]
            copies = Copies(slot.holder.get(slot.name) for slot in slots)
            if any(slot.parked is not None for slot in slots) or not copies.gain():
                holding.looked = len(slots)
                continue
            with contextlib.suppress(RuntimeError, MemoryError):
                for slot in slots:
                    self._replace(slot, map_tensors(slot.holder[slot.name], copies.own))

    def fit(self, now: int | None, keep: Key | None = None) -> None:
        """Spill or evict until the budget holds. If it cannot, raises `OverBudget` and evicts nothing."""
        over = self.accounts.bytes - (self._budget or self.accounts.bytes)
        if over <= 0:
            return
        holdings = self.accounts.holdings.values()
        possible = sum(holding.nbytes for holding in holdings if self._may_go(holding, keep))
        if possible < over:
            advice = "pass a spill, or use a window for a pinned field."
            raise OverBudget(
                f"{self.accounts.bytes - possible} bytes of the state must not be evicted, and the budget is "
                f"{self._budget}. Nothing was lost. Raise the budget"
                + (": a single entry exceeds it." if self.parking is not None else f", {advice}")
            )
        self.free(over, now, keep)

    def free(self, nbytes: int, now: int | None, keep: Key | None = None) -> int:
        """Spill (or evict without a spill) in the policy's order. Returns the bytes freed."""
        begin = self.accounts.bytes
        for key in self._ordered(self._candidates(keep)):
            if begin - self.accounts.bytes >= nbytes:
                break
            slot = self.find(key)
            if slot is None or slot.parked is not None or not self._frees(slot, keep):
                continue
            if self.parking is not None:
                self._spill(slot, keep)
            else:
                self.evict([slot], now, "the budget was exceeded")
        return begin - self.accounts.bytes

    def recall(self, slot: Slot) -> None:
        """Restore a spilled entry and all entries that share its storages."""
        assert self.parking is not None
        for number in blobs_of(slot.parked):
            try:
                storage, keys = self.parking.fetch(number)
            except (OSError, RuntimeError, MemoryError) as error:
                raise SpillFailed(
                    f"{name_of(slot.key)} was spilled and could not be restored: {error}. Everything else "
                    "is unchanged. Check that its file exists and that there is memory for it."
                ) from error
            for key in keys:
                other = self.find(key)
                assert other is not None
                value = unpark(other.parked, number, storage)
                other.storages = tuple(set(other.storages + self.accounts.add(key, value)))
                if blobs_of(value):
                    other.parked = value
                else:
                    other.parked = None
                    other.holder[other.name] = value

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply `change` to all tensors in memory."""
        for slot in self._all():
            if slot.parked is None:
                self._replace(slot, map_tensors(slot.holder[slot.name], change))

    def clear(self) -> None:
        """Remove all entries and tombstones."""
        for key in self.keys():
            self.discard(key)
        self.graves.clear()

    def _all(self) -> Iterator[Slot]:
        return itertools.chain.from_iterable(map(self.table, self._tables))

    def _candidates(self, keep: Key | None) -> list[Slot]:
        return [
            slot
            for slot in self._all()
            if slot.parked is None and slot.storages and slot.key != keep and self._may_leave(slot)
        ]

    def _may_leave(self, slot: Slot) -> bool:
        """True if the entry may leave memory: any entry with a spill, since spilling loses no data."""
        return self.parking is not None or slot.lifetime.evictable

    def _ordered(self, candidates: list[Slot]) -> list[Key]:
        """Order candidates by the policy, or by age. Entries that can only be spilled come last."""
        if self.policy is not None:
            keys = list(self.policy.order([slot.key for slot in candidates]))
        else:
            keys = [slot.key for slot in sorted(candidates, key=lambda slot: slot.number)]
        last = {slot.key for slot in candidates if not self._is_free(slot)}
        return [key for key in keys if key not in last] + [key for key in keys if key in last]

    def _is_free(self, slot: Slot) -> bool:
        """True if the entry and all that share a storage with it are evictable."""
        return slot.lifetime.evictable and all(
            (other := self.find(key)) is None or other.lifetime.evictable
            for storage in slot.storages
            for key in self.accounts.holdings[storage].keys
        )

    def _release(self, slot: Slot) -> tuple[int, list[Holding]]:
        if slot.parked is not None and self.parking is not None:
            self.parking.leave(slot.key, slot.parked)
        freed = self.accounts.remove(slot.key, slot.storages) if slot.storages else (0, [])
        slot.storages = ()
        return freed

    def _replace(self, slot: Slot, value: Any) -> None:
        self.accounts.remove(slot.key, slot.storages)
        slot.holder[slot.name] = value
        slot.storages = self.accounts.add(slot.key, value)

    def _may_go(self, holding: Holding, keep: Key | None) -> bool:
        return all(
            key != keep and (slot := self.find(key)) is not None and self._may_leave(slot)
            for key in holding.keys
        )

    def _frees(self, slot: Slot, keep: Key | None) -> bool:
        if self._compact and self.parking is None:
            return True
        return any(self._may_go(self.accounts.holdings[n], keep) for n in slot.storages)

    def _spill(self, slot: Slot, keep: Key | None) -> None:
        assert self.parking is not None
        for storage in set(slot.storages):
            holding = self.accounts.holdings[storage]
            if not self._may_go(holding, keep):
                continue
            tensors = tensors_of(self._value(slot))
            number = self.parking.put(next(t for t in tensors if storage_id(t) == storage))
            for key in list(holding.keys):
                other = self.find(key)
                assert other is not None
                other.parked = self.parking.park(number, storage, key, self._value(other))
                other.holder.pop(other.name, None)
                other.storages = tuple(one for one in other.storages if one != storage)
                self.accounts.remove(key, (storage,))

    @staticmethod
    def _value(slot: Slot) -> Any:
        return slot.holder[slot.name] if slot.parked is None else slot.parked
