"""Infers an operator's results from its arguments' shapes with torch's fake tensors, cached by case."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from torchtrim.dispatch.modes import asking

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_CPU = torch.device("cpu")
_NUMBERS = 2**22
_FLOATS = 2**8
"""Elements of the largest tensors to compute. Arbitrary: programs branch on integers, rarely on floats."""
_CASES = 2**16
"""Cached cases. Arbitrary: far more than the distinct calls of one program."""


class Geometry(NamedTuple):
    """Shape, strides and dtype of a tensor to create."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Oracle:
    """Infers the results of operators: each a `Geometry`, a list of them, or a value that is not a tensor.

    Results are cached across dry runs, up to a number of cases.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_fallback_kernels=False)
        self._cases: dict[Any, Any] = {}

    def results(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the results of a call. Errors the operator raises for such arguments propagate."""
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())))
            known = self._cases.get(key)
        except TypeError:
            return self._infer(func, args, kwargs)
        if known is None:
            if len(self._cases) >= _CASES:
                self._cases.clear()
            known = self._cases[key] = self._infer(func, args, kwargs)
        return known

    def _infer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Infer results; for `_foreach` operators once for each group of equal list elements."""
        alike = _alike(func, (*args, *kwargs.values()))
        if alike is None:
            return self._infer_with_torch(func, args, kwargs)
        first = [places[0] for places in alike]
        named = {name: _at(value, first) for name, value in kwargs.items()}
        few = self._infer_with_torch(func, [_at(value, first) for value in args], named)
        return _spread(few, alike)

    def _infer_with_torch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Silence torch's log, which would report the script's errors as torch's own.
        was, _LOG.disabled = _LOG.disabled, True
        try:
            with asking(), self._mode:
                given, named = tree_map(self._fake, ([*args], kwargs))
                return _geometry(func(*given, **named))
        finally:
            _LOG.disabled = was

    def _fake(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            geometry = value.shape, value.stride()
            meta = torch.empty_strided(*geometry, dtype=value.dtype, device="meta")
            return FakeTensor(self._mode, meta, _CPU)
        return None if isinstance(value, torch.Generator) else value


@functools.cache
def oracle() -> Oracle:
    """Return the process-wide oracle."""
    return Oracle()


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return type(value), value


def _alike(func: Any, values: Sequence[Any]) -> list[list[int]] | None:
    """Group the indices of equal elements of a `_foreach` operator's lists; None for other operators."""
    lists = [value for value in values if isinstance(value, (list, tuple))]
    if not func.name().startswith("aten::_foreach_") or len(set(map(len, lists))) != 1:
        return None
    found: dict[Any, list[int]] = {}
    for place, row in enumerate(zip(*lists, strict=True)):
        found.setdefault(_key(row), []).append(place)
    return [*found.values()]


def _at(value: Any, places: Sequence[int]) -> Any:
    return [value[place] for place in places] if isinstance(value, (list, tuple)) else value


def _spread(few: Any, alike: Sequence[Sequence[int]]) -> Any:
    if not isinstance(few, list):
        return few
    if len(few) != len(alike):
        return [_spread(one, alike) for one in few]
    spread = {place: one for one, places in zip(few, alike, strict=True) for place in places}
    return [spread[place] for place in sorted(spread)]


def _geometry(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return Geometry(tuple(result.shape), tuple(result.stride()), result.dtype)
    if isinstance(result, (list, tuple)):
        return [_geometry(item) for item in result]
    return result


def geometries_in(geometry: Any) -> Sequence[Geometry]:
    """Return the geometries among results, in order."""
    if isinstance(geometry, Geometry):
        return (geometry,)
    if isinstance(geometry, list):
        return [one for item in geometry for one in geometries_in(item)]
    return ()


def is_small(tensors: Iterable[Any]) -> bool:
    """Return True if the tensors are cheap to compute: sizes, masks, flags."""
    for tensor in tensors:
        floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if math.prod(tensor.shape) > (_FLOATS if floats else _NUMBERS):
            return False
    return True
