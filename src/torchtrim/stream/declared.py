"""Bound the caches of any module by declared lifetimes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import nn

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream.frames import FrameSet, Routed
from torchtrim.stream.lifetimes import Lifetime, bounded, is_unbounded
from torchtrim.stream.storages import state_bytes
from torchtrim.stream.store import REMEMBERED, StateStore
from torchtrim.stream.tombstones import Evicted, Key, Newest, Tombstone

_ADVICE = "The module reads further back than declared: declare a longer window."


class _Quiet:
    """A cache as its store accesses it, bypassing the overrides that watch the module."""

    def __init__(self, cache: dict[Any, Any]) -> None:
        self._cache = cache

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self._cache, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        dict.__setitem__(self._cache, key, value)

    def get(self, key: Any) -> Any:
        return dict.get(self._cache, key)

    def pop(self, key: Any, default: Any) -> Any:
        return dict.pop(self._cache, key, default)


class _Cache(Routed):
    """A dict with evictable entries. Reading an evicted one raises `Evicted`; `get` and `in` miss it.

    The store knows an entry by the call that wrote it and by its position among the entries of that call.
    """

    def __init__(self, entries: dict[Any, Any], store: StateStore, field: str) -> None:
        super().__init__(entries)
        self._store, self._field = store, field
        self._quiet: Any = _Quiet(self)
        self._fresh = dict.fromkeys(entries)
        self._entries: dict[Any, Key] = {}
        self._evicted = Newest(REMEMBERED)
        self._older = FrameSet()

    def end_frame(self, frame: int) -> None:
        """Hand entries written since the last frame to the store."""
        fresh, self._fresh = self._fresh, {}
        for place, key in enumerate(key for key in fresh if key in self):
            self._forget(key)
            entry = self._entries[key] = (self._field, (place, frame))
            self._store.adopt(entry, self._quiet, key)

    def after_end(self) -> None:
        """Remember the entries evicted at the end of this frame."""
        for key in [key for key, entry in self._entries.items() if entry not in self._store]:
            self._evicted[key] = self._entries.pop(key)
        while len(self._evicted) > self._evicted.maxlen:
            key, _ = self._evicted.popitem(last=False)
            if isinstance(key, int):
                self._older.add(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._fresh[key] = None

    def __missing__(self, key: Any) -> Any:
        entry = self._entries.get(key) or self._evicted.get(key)
        if entry is not None and self._store.recall(entry):
            return self[key]
        tombstone = None if entry is None else self._store.tombstone(entry)
        if tombstone is None and isinstance(key, int) and self._older.knows(key) is not False:
            why = "its lifetime was over"
            tombstone = Tombstone(self._field, key, None, why, certain=bool(self._older.knows(key)))
        if tombstone is None:
            raise KeyError(key)
        raise Evicted(tombstone, _ADVICE)

    def pop(self, key: Any, *default: Any) -> Any:
        value = super().pop(key, *default)
        self._forget(key)
        return value

    def _forget(self, key: Any) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._store.forget(entry)


class BoundCaches:
    """A module with bounded caches, created by `bound_caches` and undone by `release()`.

    `store` keeps track of the entries. `frames` counts calls of the module.
    """

    def __init__(
        self, module: nn.Module, fields: Mapping[str, Lifetime], store: StateStore
    ) -> None:
        self.store = store
        self.frames = 0
        self._module = weakref.ref(module)
        self._fields = dict(fields)
        bounded.add(type(self).__name__)
        for field in fields:
            self._taken_over(field)
        self._hook = module.register_forward_hook(self._called, always_call=True)

    @property
    def bytes(self) -> int:
        """Bytes of all storages that the declared caches keep alive, each counted once."""
        return state_bytes([_find(self._module(), field)[2] for field in self._fields])

    def end_frame(self) -> None:
        """End a call of the module: evict the entries whose lifetime is over."""
        caches = {field: self._taken_over(field) for field in self._fields}
        self.store.advance(self.frames)
        for field, cache in caches.items():
            if isinstance(cache, _Cache):
                cache.end_frame(self.frames)
            elif not is_unbounded():
                _shorten(cache, self._fields[field])
        self.store.end()
        for cache in caches.values():
            if isinstance(cache, _Cache):
                cache.after_end()
        self.frames += 1

    def release(self) -> None:
        """Remove the bounds: remaining entries move to plain dicts, which grow again."""
        self._hook.remove()
        for key in list(self.store):
            self.store.recall(key)
        for field in self._fields:
            holder, name, cache = _find(self._module(), field)
            if isinstance(cache, _Cache):
                _put(holder, name, dict(cache))

    def _called(self, module: nn.Module, *_: Any) -> None:
        self.end_frame()

    def _taken_over(self, field: str) -> Any:
        """Return the cache. A plain dict that the module has put there is replaced by a `_Cache`."""
        holder, name, cache = _find(self._module(), field)
        if isinstance(cache, dict) and not isinstance(cache, _Cache):
            cache = _Cache(cache, self.store, field)
            _put(holder, name, cache)
        return cache


def bound_caches(
    module: nn.Module, lifetimes: Mapping[str, Lifetime], **options: Any
) -> BoundCaches:
    """Bound the caches of a module that has no adapter, in three lines:

        from torchtrim.stream import bound_caches, volatile, window
        caches = {"memory": window(6), "encoder.images": volatile()}
        bound_caches(model, caches)

    A name is an attribute, with dots for nested attributes. Each call of the module is a frame. Entries of a
    dict age from the call that wrote them; `window(n)` keeps entries that are read up to n calls later. A
    list or deque keeps its newest `n` entries after each call: use it for those that gain one entry per
    call and are read from the end, since positions shift. Reading an evicted dict entry raises `Evicted`.
    `options` are those of `StateStore` (budget, policy, spill, every) and apply to dicts.

    `learn_state` finds lifetimes that are long enough, and `torchtrim verify --stream` proves it. Raises
    `UsageError`, before any change, for a name that is not a cache or a lifetime that it cannot have.
    """
    if not lifetimes:
        raise UsageError('declare at least one cache: bound_caches(model, {"memory": window(6)}).')
    store = StateStore(dict(lifetimes), **options)
    for field, lifetime in lifetimes.items():
        _check(field, _find(module, field)[2], lifetime)
    return BoundCaches(module, lifetimes, store)


def _find(module: Any, field: str) -> tuple[Any, str, Any]:
    """Return the object that holds a cache, the cache's name in it, and the cache."""
    *path, name = field.split(".")
    holder = module
    try:
        for part in path:
            holder = _part(holder, part)
        return holder, name, _part(holder, name)
    except (AttributeError, KeyError, TypeError):
        raise UsageError(
            f"{type(module).__name__} has no {field!r}. Name an attribute that is a dict, list or deque, "
            "with dots for nested attributes: 'tracker.memory'."
        ) from None


def _part(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _check(field: str, cache: Any, lifetime: Lifetime) -> None:
    if isinstance(cache, _Cache):
        raise UsageError(f"{field!r} is already bound; call release() before binding it again.")
    if isinstance(cache, list | deque):
        if lifetime.kind not in ("window", "volatile"):
            raise UsageError(
                f"{field!r} is a {type(cache).__name__}, which supports window(n) and volatile(), not "
                f"{lifetime}."
            )
    elif type(cache) is not dict:
        raise Unsupported(
            f"{field!r} is a {type(cache).__name__}; only a plain dict, a list or a deque can be bounded. "
            "Nothing was changed."
        )


def _shorten(cache: Any, lifetime: Lifetime) -> None:
    surplus = max(len(cache) - (lifetime.frames or 0), 0)
    if isinstance(cache, list):
        del cache[:surplus]
    else:
        for _ in range(surplus):
            cache.popleft()


def _put(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
