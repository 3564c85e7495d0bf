"""Bytes of the storages that operators made and that are alive, by the line that asked for them."""

from __future__ import annotations

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.dispatch.modes import enter_below, leave, tensors_among
from torchtrim.dispatch.places import Places, Spot
from torchtrim.dispatch.storages import parts_of


class Maker(NamedTuple):
    """Who asked for a storage: the innermost line outside torch, the user's line that led there if it is
    another, and whether gradients were on."""

    spot: Spot | None
    caller: Spot | None
    graded: bool


class _Watched(weakref.ref[Any]):
    """A weak reference to a storage, with who made it."""

    __slots__ = ("key", "maker")
    key: int
    maker: Maker


class Alive(TorchDispatchMode):
    """Watches the storages that operators make, from `begin` to `end`.

    What was there before is not counted, nor what lives inside one operator only.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places
        self._pid = os.getpid()
        self._living: dict[int, _Watched] = {}
        self._on_death = self._died

    def begin(self) -> None:
        """Watch, below the modes that the script has entered."""
        enter_below(self)

    def end(self) -> None:
        """Watch no longer."""
        leave(self)
        self._living.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if os.getpid() == self._pid:
            made = out if isinstance(out, tuple | list) else (out,)
            for tensor in tensors_among(made):
                for part in parts_of(tensor):
                    self._see(part)
        return out

    def by_maker(self, leave_out: Collection[int]) -> dict[Maker, dict[int, int]]:
        """Storages alive, each with its bytes, by their maker; without those left out."""
        found: defaultdict[Maker, dict[int, int]] = defaultdict(dict)
        for key, watched in list(self._living.items()):
            storage = watched()
            if storage is not None and key not in leave_out:
                found[watched.maker][key] = storage.nbytes()
        return dict(found)

    def _see(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = storage._cdata
        if key in self._living:
            return
        watched = _Watched(storage, self._on_death)
        spot, caller = self._places.find(sys._getframe().f_back)
        watched.key, watched.maker = key, Maker(spot, caller, torch.is_grad_enabled())
        self._living[key] = watched

    def _died(self, watched: _Watched) -> None:
        if self._living.get(watched.key) is watched:
            del self._living[watched.key]
