"""The engine of techniques that substitute saved tensors: each is kept, recomputed or fetched.

A dispatch mode follows the operators of watched modules, and saved-tensor hooks give autograd substitutes.
Autograd runs only the innermost hooks, so a watcher passes other tensors on to the watcher around it.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.core.units import counted
from torchtrim.core.words import listed
from torchtrim.dispatch.modes import has_own_dispatch, written_arguments
from torchtrim.executor.block_state import version_of
from torchtrim.executor.failing import note
from torchtrim.executor.notices import say
from torchtrim.executor.ordinals import CallRoles, counting, is_numbered, unnumbered
from torchtrim.executor.registry import Handle
from torchtrim.executor.roles import OperatorOrdinal, is_inside
from torchtrim.executor.swap import Swapped

PLAIN = (torch.Tensor, nn.Parameter)
"""Types of tensors that watchers may substitute."""


class CountedCall(Protocol):
    """A watched call."""

    @property
    def counts(self) -> MutableMapping[str, int]:
        """How often operators of each role have run in it."""


CallT = TypeVar("CallT", bound=CountedCall)
_SHOWN = 4  # Arbitrary; the number of operators that a message lists.


class Saved(Protocol):
    """Autograd's substitute for a saved tensor."""

    def get(self) -> torch.Tensor:
        """Return the tensor."""


Keep = Callable[[torch.Tensor], Saved | torch.Tensor]


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a saved tensor from its graph, to avoid a reference cycle."""
    if tensor.grad_fn is None:
        return tensor
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


class VersionedTensor:
    """A saved tensor and its version: autograd checks none under hooks."""

    __slots__ = ("__weakref__", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = version_of(tensor)

    @classmethod
    def detached(cls, tensor: torch.Tensor) -> Self:
        """Keep a tensor without its graph."""
        return cls(detached(tensor))

    @property
    def is_written(self) -> bool:
        """Return True if it was written to since."""
        return version_of(self.tensor) != self._version

    def get(self) -> torch.Tensor:
        """Return the tensor. Raises `RuntimeError`, as autograd does, if it was written to since."""
        self.check(self.tensor.shape)
        return self.tensor

    def check(self, shape: Sequence[int]) -> None:
        """Raise `RuntimeError` if it was written to since. `shape`: for the message."""
        if self.is_written:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(shape)} is at version {self.tensor._version}; "
                f"expected version {self._version} instead."
            )


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without elements that shares the version of this one, but not its memory."""
    with torch._C._DisableTorchDispatch():
        empty = tensor.detach()
    with torch.no_grad(), unnumbered():
        empty.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty


class OperatorKind(NamedTuple):
    """An operator: its name, its role if the plan counts it here, and the arguments it writes."""

    name: str
    role: str
    writes: tuple[tuple[int, str], ...]

    def written(self, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a call that the operator writes."""
        return [args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes]


class SavedTensorWatcher(TorchDispatchMode, Generic[CallT]):  # type: ignore[no-untyped-call]
    """Dispatch mode and saved-tensor hooks of a technique, active while any of its modules runs.

    `roles`: the operator roles it counts, or None for all. `kept`: makes the substitutes of other tensors.
    `nests`: False if only outermost calls outside of other watchers are watched. Calls under other
    hooks, such as a checkpoint's, run unwatched.
    """

    def __init__(
        self, technique: str, roles: Collection[str] | None, kept: Keep, *, nests: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._technique = technique
        self._roles = roles
        self._nests = nests
        self._kinds: dict[Any, OperatorKind] = {}
        self._has_warned = False
        self._hooks = self.pack, _unpack
        self.keep = self._kept = kept
        self._named = CallRoles()
        self._missed: dict[str, str] = {}
        self._told: set[str] = set()
        self.calls: list[CallT] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that functions compiled by the script stay compiled."""
        return True

    @abstractmethod
    def operator(self, kind: OperatorKind, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        """Return the plan's substitute for a saved tensor, or else `self.keep(tensor)`."""

    @abstractmethod
    def skip(self, counts: Counter[str]) -> None:
        """Advance the ordinals for operators that were substituted."""

    @abstractmethod
    def planned(self, call: CallT) -> Mapping[str, Collection[OperatorOrdinal]]:
        """Return the operators that a call must run, by their places in the plan."""

    @abstractmethod
    def end(self, call: CallT) -> None:
        """Drop the records of a call that has ended."""

    def watch(self, module: nn.Module, where: str, new_call: Callable[[], CallT]) -> Handle:
        """Watch the calls of a module."""

        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._run(
                where, new_call, functools.partial(forward, *args, **kwargs)
            )

        return Swapped(module, wrap)

    def warn_if_foreign(self, where: str) -> bool:
        """Return True, and warn once, if the script's own hooks hide saved tensors at this place."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None or top[1] is _unpack:
            return False
        if not self._has_warned:
            self._has_warned = True
            say(
                where,
                "runs under hooks on saved tensors that the script has set (saved_tensors_hooks, save_on_cpu "
                f"or a checkpoint), so {self._technique} saves nothing there, and the peak may exceed the "
                "plan's budget. The results are not affected. Plan again with these hooks on from the first "
                "step, or remove them.",
            )
        return True

    def miss(self, place: str, why: str) -> None:
        """Note why a place keeps what it names on this device; the first reason counts."""
        self._missed.setdefault(place, why)

    def _tell_missed(self, where: str, call: CallT) -> None:
        """Say, after the first call of a module, which of its places the program lacks here."""
        if where in self._told:
            return
        self._told.add(where)
        planned = self.planned(call)
        for place, operators in planned.items():
            lacks = [one for one in operators if one.ordinal >= call.counts.get(one.name, 0)]
            # What runs inside another kernel leaves nothing there to drop.
            inside = all(is_inside(one.name) for one in lacks)
            if lacks and (len(lacks) == len(operators) or not inside):
                first = f"{lacks[0].name}.{lacks[0].ordinal}"
                self.miss(place, f"{first} is part of a kernel" if inside else f"no {first}")
        missed = {place: self._missed[place] for place in planned if place in self._missed}
        if missed:
            say(
                where,
                f"{len(missed)} of {counted(len(planned), 'place')} of {self._technique} apply in part "
                f"or not at all here ({listed(sorted({*missed.values()}), _SHOWN)}): the plan is from a "
                "device with other kernels or memory, or the program has changed. All else applies and "
                "the results are the same; the peak may exceed the plan's. Plan again on this device.",
            )

    def _run(self, where: str, new_call: Callable[[], CallT], forward: Callable[[], Any]) -> Any:
        is_inner = bool(self.calls)
        if not torch.is_grad_enabled() or (is_inner and not self._nests):
            return forward()
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self.warn_if_foreign(where) or (top is not None and not self._nests):
            return forward()
        self.calls.append(call := new_call())
        try:
            if is_inner:
                result = forward()
            else:
                self.keep = self._kept if top is None else top[0]
                hooks = torch.autograd.graph.saved_tensors_hooks(*self._hooks)
                with hooks, counting(self.skip), self:
                    result = forward()
            self._tell_missed(where, call)
            return result
        except Exception as error:
            note(error, where)
            raise
        finally:
            self.calls.pop()
            self.end(call)
            if not is_inner:
                self._named.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(has_own_dispatch, types)):
            return NotImplemented
        kind = self._kinds.get(func) or self._know(func)
        if torch._C._current_autograd_node() is not None or not is_numbered():
            return self.operator(kind, func, args, kwargs or {})
        role = self._named.role(func, args)
        for joined in self._named.joined:
            self._take_back(joined)
        if self._roles is None or role in self._roles:
            kind = kind._replace(role=role)
        result = self.operator(kind, func, args, kwargs or {})
        self._named.made(result)
        return result

    def _take_back(self, role: str) -> None:
        for call in self.calls:
            if role in call.counts:
                call.counts[role] -= 1

    def _know(self, func: Any) -> OperatorKind:
        namespace, _, name = str(func).partition(".")
        name = name.partition(".")[0] if namespace == "aten" else ""
        kind = self._kinds[func] = OperatorKind(name, "", written_arguments(func))
        return kind


def _unpack(saved: Saved | torch.Tensor) -> torch.Tensor:
    return saved if isinstance(saved, torch.Tensor) else saved.get()


def geometry_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return a tensor's shape, strides and offset in its storage."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def when_asked(then: Callable[[], None]) -> None:
    """Call `then` after the last unpack of a saved tensor.

    That is now, or at the end of the backward of a Python function, which unpacks all its tensors at each
    access to `saved_tensors`.
    """
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction):
        then()
        return

    def ended(*_: Any) -> None:
        handle.remove()
        then()

    handle = node.register_hook(ended)
