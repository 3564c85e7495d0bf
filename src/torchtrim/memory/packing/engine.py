"""Inner loops of the packer, in plain Python or compiled by numba, with matching arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

from torchtrim.core.caches import compiler
from torchtrim.memory.packing import greedy, search

_CHOICES, _TRAIL = 64, 256  # Arbitrary; entries per buffer. A full array ends the attempt.


@dataclass(frozen=True, kw_only=True)
class LoopEngine:
    """Loop functions and constructors of their arrays. `pace` is units of effort per second."""

    name: str
    search: Callable[..., int]
    place: Callable[..., int]
    array: Callable[[Iterable[int]], Any]
    empty: Callable[[int], Any]
    pace: float

    def room(self, count: int, sections: int) -> tuple[Any, ...]:
        """Allocate the working memory of `search`, which is linear in the number of buffers."""
        lengths = (
            *(count,) * 5,
            sections + 1,
            (count + 1) * search.FIELDS,
            (2 * count + 4) * search.SPLIT_FIELDS,
            search.COUNTERS,
            _CHOICES * (count + 1),
            _TRAIL * (count + 1),
            count,
            sections + 1,
        )
        return tuple(map(self.empty, lengths))


@cache
def plain() -> LoopEngine:
    """Return the engine of plain Python loops over lists."""
    return LoopEngine(
        name="python",
        search=search.search,
        place=greedy.place_in_lists,
        array=list,
        empty=lambda length: [0] * length,
        pace=1e7,
    )


def can_compile() -> bool:
    """Return True if numba is installed."""
    return find_spec("numba") is not None


@cache
def compiled() -> LoopEngine:
    """Return the engine of numba's compiled functions, which are cached on disk."""
    numpy = import_module("numpy")
    return LoopEngine(
        name="numba",
        search=_compile(search)["search"],
        place=_compile(greedy, only=("place",))["place"],
        array=lambda values: numpy.array(list(values), dtype=numpy.int64),
        empty=lambda length: numpy.zeros(length, dtype=numpy.int64),
        pace=4e8,
    )


def _compile(module: ModuleType, only: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Compile the module's functions so that they call each other's compiled versions."""
    jit = compiler(nogil=True)
    names = dict(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and (only is None or name in only):
            names[name] = jit(FunctionType(value.__code__, names, name, value.__defaults__))
    return names
