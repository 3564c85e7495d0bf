"""Compares the script's state outside models and optimizers that persists from step to step: weight averages,
counters, histories, in variables of running functions and the objects they hold."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.dispatch.places import Places
from torchtrim.evidence.attributes import Described, described
from torchtrim.evidence.generators import Generators, scopes

_PLAIN = (bool, int, str, bytes, type(None))
_CONTAINERS = (dict, list, set, deque)
_SMALL = 64 * 1024
"""Tensors up to this size are always hashed, since writes through `.data` do not change the version."""
UNCHANGED = "unchanged"


Same = Callable[[Any, list[torch.Tensor]], bool]
"""Returns True if a value that holds these tensors is the one of the previous step."""


class _Mark(NamedTuple):
    """A tensor as seen in the previous step: the object and its version counter."""

    tensor: weakref.ref[torch.Tensor]
    version: int


class ScriptState:
    """Reader of the script's variables. `number` returns -1 for modules compared here.

    A variable counts if it is an integer, a boolean or a string; or a container, object or tensor that is
    the same one as in the previous step. So values created anew in each step do not count, nor do bare
    floats, which are mostly times. Nothing is kept alive that holds a graph or more than 64 KiB of tensors.
    """

    def __init__(self, places: Places, number: Callable[[nn.Module], int]) -> None:
        self._places = places
        self._number = number
        self.generators = Generators(places)
        self._same: dict[str, Same] = {}
        self._texts: dict[str, str] = {}
        self._marks: dict[str, _Mark] = {}

    def changes(self, frame: FrameType | None) -> Iterator[tuple[str, torch.Tensor | str]]:
        """Yield `(name, value)` of variables that already existed: a tensor, a digest, or `UNCHANGED`."""
        known, self._same = self._same, {}
        texts, self._texts = self._texts, {}
        for name, value in list(self._stateful(frame)):
            with contextlib.suppress(Exception):
                one = described(value, self._opened)
                self._same[name] = _same_as(value, one)
                self._texts[name] = one.digest
                if name in known and known[name](value, one.tensors):
                    yield name, UNCHANGED if texts[name] == one.digest else one.digest
                    yield from self._tensors(name, one.tensors)

    def _tensors(
        self, name: str, tensors: list[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor | str]]:
        for number, tensor in enumerate(tensors):
            label = f"{name}.{number}"
            seen, mark = self._marks.get(label), _mark(tensor)
            self._marks[label] = mark
            is_same = seen is not None and seen.tensor() is tensor and seen.version == mark.version
            yield label, UNCHANGED if is_same and _bytes(tensor) > _SMALL else tensor

    def _stateful(self, frame: FrameType | None) -> Iterator[tuple[str, Any]]:
        for scope, variables in scopes(self._places, frame):
            for name, value in list(variables.items()):
                with contextlib.suppress(Exception):
                    if not name.startswith("__") and self._counts(value):
                        yield f"{scope}.{name}", value

    def _counts(self, value: Any) -> bool:
        if isinstance(value, (*_PLAIN, torch.Tensor)) or type(value) in _CONTAINERS:
            return True
        return self._opened(value) is not None

    def _opened(self, value: Any) -> dict[str, Any] | None:
        """Return an object's attributes if its class is the script's or has a `state_dict`, else None."""
        kind = type(value)
        if isinstance(value, type) or inspect.isroutine(value):
            return None
        if isinstance(value, torch.optim.Optimizer):
            return {}
        if isinstance(value, nn.Module):
            return _tensors_of(value) if self._number(value) < 0 else {}
        if not hasattr(value, "__dict__"):
            return None
        of_user = self._is_users(kind)
        return vars(value) if of_user or callable(getattr(kind, "state_dict", None)) else None

    def _is_users(self, kind: type) -> bool:
        methods = (one for one in vars(kind).values() if inspect.isfunction(one))
        code = next((one.__code__ for one in methods), None)
        return code is not None and self._places.is_users((code, 0))


def _tensors_of(module: nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _same_as(value: Any, one: Described) -> Same:
    if isinstance(value, _PLAIN):
        return lambda other, _: True
    if type(value) not in (list, dict):
        known = weakref.ref(value)
        return lambda other, _: known() is other
    graph = any(tensor.grad_fn is not None for tensor in one.tensors)
    if one.is_plain and not graph and sum(map(_bytes, one.tensors)) <= _SMALL:
        return lambda other, _: other is value
    number, inner = id(value), [weakref.ref(tensor) for tensor in one.tensors]
    return lambda other, found: (
        id(other) == number
        and (not inner or any(a() is b for a, b in zip(inner, found, strict=False)))
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _mark(tensor: torch.Tensor) -> _Mark:
    version = -1 if tensor.is_inference() else tensor._version
    return _Mark(weakref.ref(tensor), version)
