"""Compares the script's own state from step to step: weight averages, counters, histories, in variables of
running functions and the objects they hold."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from torchtrim.dispatch.places import Places
from torchtrim.evidence.attributes import Described, described
from torchtrim.evidence.generators import Generators, scopes

_PLAIN = (bool, int, str, bytes, type(None))
_CONTAINERS = (dict, list, set, deque)
_SMALL = 64 * 1024
"""Bytes of a tensor that is always hashed, since writes through `.data` do not change the version."""
UNCHANGED = "unchanged"


Same = Callable[[Any, list[torch.Tensor]], bool]
"""Returns True if a value that holds these tensors is the one of the previous step."""


class ScriptState:
    """A reader of the script's variables. `number` returns -1 for modules compared here.

    A variable counts if it is an integer, a boolean or a string; or a container, object or tensor that is
    the same one as in the previous step. So values created anew in each step do not count, nor do bare
    floats, which are mostly times.

    A list or dict that the script had before its first step is kept until it is replaced, with up to 64 KiB
    of tensors. Others with tensors are not, since they would count in the peak of a step that makes them.
    """

    def __init__(self, places: Places, number: Callable[[nn.Module], int]) -> None:
        self._places = places
        self._number = number
        self.generators = Generators(places)
        self._first: dict[str, Any] | None = None
        self._same: dict[str, Same] = {}
        self._texts: dict[str, str] = {}
        self._marks: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}

    def begins(self, frame: FrameType | None) -> None:
        """Note the lists and dicts that the script has before its first step. Later calls do nothing."""
        if self._first is None:
            variables = self._variables(frame)
            self._first = {name: one for name, one in variables if type(one) in (list, dict)}

    def changes(self, frame: FrameType | None) -> Iterator[tuple[str, torch.Tensor | str]]:
        """Yield `(name, value)` of variables that already existed: a tensor, a digest, or `UNCHANGED`."""
        known, self._same = self._same, {}
        texts, self._texts = self._texts, {}
        variables = self._variables(frame)
        now, first = dict(variables), self._first or {}
        self._first = {name: one for name, one in first.items() if now.get(name) is one}
        for name, value in variables:
            with contextlib.suppress(Exception):
                if isinstance(value, LRScheduler):
                    # Its rates are settings of the optimizer; a schedule may be of another class.
                    value = value.last_epoch
                is_plain = isinstance(value, (*_PLAIN, torch.Tensor)) or type(value) in _CONTAINERS
                if not is_plain and self._opened(value) is None:
                    continue
                one = described(value, self._opened)
                self._same[name] = _same_as(value, one, lasts=name in self._first)
                self._texts[name] = one.digest
                if name not in known or not known[name](value, one.tensors):
                    continue
                yield name, UNCHANGED if texts[name] == one.digest else one.digest
                for number, tensor in enumerate(one.tensors):
                    is_same = self._is_same(label := f"{name}.{number}", tensor)
                    yield label, UNCHANGED if is_same and _bytes(tensor) > _SMALL else tensor

    def _variables(self, frame: FrameType | None) -> list[tuple[str, Any]]:
        return [
            (f"{scope}.{name}", value)
            for scope, table in scopes(self._places, frame)
            for name, value in list(table.items())
            if isinstance(name, str) and not name.startswith("__")
        ]

    def _is_same(self, label: str, tensor: torch.Tensor) -> bool:
        """Return True for the same tensor as in the previous step, with the same version counter."""
        known, version = self._marks.get(label), -1 if tensor.is_inference() else tensor._version
        self._marks[label] = weakref.ref(tensor), version
        return known is not None and known[0]() is tensor and known[1] == version

    def _opened(self, value: Any) -> dict[str, Any] | None:
        """Return an object's attributes if its class is the script's or has a `state_dict`, else None."""
        kind = type(value)
        if isinstance(value, type) or inspect.isroutine(value):
            return None
        if isinstance(value, torch.optim.Optimizer):
            return {}
        if isinstance(value, nn.Module):
            if self._number(value) >= 0:
                return {}
            return dict[str, Any]((*value.named_parameters(), *value.named_buffers()))
        if not hasattr(value, "__dict__"):
            return None
        methods = (one for one in vars(kind).values() if inspect.isfunction(one))
        code = next((one.__code__ for one in methods), None)
        is_users = code is not None and self._places.is_users((code, 0))
        return vars(value) if is_users or callable(getattr(kind, "state_dict", None)) else None


def _same_as(value: Any, one: Described, *, lasts: bool) -> Same:
    """Return the test. `lasts`: the value is older than the first step."""
    if isinstance(value, _PLAIN):
        return lambda other, _: True
    if type(value) not in (list, dict):
        known = weakref.ref(value)
        return lambda other, _: known() is other
    graph = any(tensor.grad_fn is not None for tensor in one.tensors)
    small = lasts and not graph and sum(map(_bytes, one.tensors)) <= _SMALL
    if one.is_plain and (small or not one.tensors):
        return lambda other, _: other is value
    number, inner = id(value), [weakref.ref(tensor) for tensor in one.tensors]
    return lambda other, found: (
        id(other) == number
        and (not inner or any(a() is b for a, b in zip(inner, found, strict=False)))
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
