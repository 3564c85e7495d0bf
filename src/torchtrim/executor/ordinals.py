"""Count operators as the original program runs them, for the ordinals in plans.

A technique that runs a module in parts, or probes it first, runs other operators. Those get no ordinals; the
program's own operators still count. So a plan's ordinals name the same operators whatever
other techniques it contains.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.dispatch.modes import call_operator, tensors_among
from torchtrim.executor.roles import RECURRENT, OperatorRoles

AsBefore = Callable[[bool], contextlib.AbstractContextManager[None]]
Skip = Callable[[Counter[str]], None]


class _Thread(threading.local):
    """`depth`: nesting of techniques' own runs. `counting`: callbacks with the depth they count at."""

    depth = 0
    counting: tuple[tuple[int, Skip], ...] = ()


_thread = _Thread()


def is_numbered() -> bool:
    """Return True if the operators running now are the program's own."""
    return _thread.depth == 0


@contextlib.contextmanager
def unnumbered() -> Iterator[AsBefore]:
    """Exclude a technique's operators from ordinals. Yields a context manager that can include them again."""
    before = _thread.depth
    with _at(before + 1):
        yield lambda own: _at(before if own else _thread.depth)


@contextlib.contextmanager
def _at(depth: int) -> Iterator[None]:
    before, _thread.depth = _thread.depth, depth
    try:
        yield
    finally:
        _thread.depth = before


@contextlib.contextmanager
def counting(skip: Skip) -> Iterator[None]:
    """Call `skip(counts)` for operators that were substituted: how many, by their roles."""
    before = _thread.counting
    _thread.counting = (*before, (_thread.depth, skip))
    try:
        yield
    finally:
        _thread.counting = before


def passed(counts: Counter[str]) -> None:
    """Report the program's own operators that would have run here."""
    for depth, skip in _thread.counting:
        if depth == _thread.depth:
            skip(counts)


class CallRoles:
    """Names the operators that a dispatch mode sees. A weak reference keeps a marked storage's address."""

    def __init__(self) -> None:
        self._roles = OperatorRoles()
        self._held: dict[int, StorageWeakRef] = {}

    def role(self, func: Any, args: Any) -> str:
        """Return the role of the program's operator that runs next."""
        namespace, _, name = func.name().partition("::")
        name, _, overload = name.partition(".")
        of_torch = name if namespace == "aten" else ""
        return self._roles.role(
            of_torch,
            overload,
            lambda: [*map(storage_number, tensors_among(args))],
            recurs=_recurs(sys._getframe(1)),
        )

    @property
    def joined(self) -> tuple[str, ...]:
        """Roles that operators before it were counted by, though they belong to its group."""
        return self._roles.joined

    def made(self, result: Any) -> None:
        """Note what the operator returned."""
        if not self._roles.asks:
            return
        tensor = next(tensors_among([result]), None)
        if tensor is not None and (key := storage_number(tensor)):
            self._held.setdefault(key, StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
            self._roles.made(key)

    def clear(self) -> None:
        """Forget all storages, at the end of a call."""
        self._held.clear()
        self._roles.clear()


_RECURRENT = frozenset(getattr(nn, name).forward.__code__ for name in RECURRENT)
_FRAMES = 8
"""Frames from a mode up to the module's own forward: other modes in between take a few each."""


def _recurs(frame: FrameType | None) -> bool:
    """Return True if the forward of a recurrent module runs."""
    for _ in range(_FRAMES):
        if frame is None or frame.f_code in _RECURRENT:
            return frame is not None
        frame = frame.f_back
    return False


def storage_number(tensor: torch.Tensor) -> int:
    """Return a number that identifies a live storage, 0 for a tensor without one, such as a sparse one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the program's own forward operators by role, those without one by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._depth = _thread.depth
        self._roles = CallRoles()
        # A checkpoint reruns forward inside of a backward.
        self._is_rerun = torch._C._current_autograd_node() is not None

    def __enter__(self) -> Counting:
        self._counting = counting(self.counts.update)
        self._counting.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._counting.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_forward = self._is_rerun or torch._C._current_autograd_node() is None
        if _thread.depth != self._depth or not is_forward:
            return call_operator(func, args, kwargs or {})
        self.counts[self._roles.role(func, args) or func.name()] += 1
        self.counts.subtract(self._roles.joined)
        result = call_operator(func, args, kwargs or {})
        self._roles.made(result)
        return result
