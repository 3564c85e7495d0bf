"""Run a module by memory plans, one for each geometry of its inputs.

If the module's graph cannot be captured, its children are planned separately at their first call. A module
without children then runs unplanned.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchtrim.errors import TorchtrimError, Unsupported
from torchtrim.executor.network.capture import capture, plain_state
from torchtrim.executor.network.captured import Captured
from torchtrim.executor.network.parts import PartsProgram
from torchtrim.executor.network.program import Program, Switches, tensors_of
from torchtrim.executor.swap import Swapped

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the call's arguments, flat, in torch.export's order."""
    return pytree.tree_flatten((args, kwargs))


def signature_of(leaves: list[Any], spec: pytree.TreeSpec) -> Hashable:
    """Return the geometry of tensors and the values of other inputs. Raises `Unsupported` for objects."""
    return spec, tuple(_of_leaf(leaf) for leaf in leaves), _autocast_key()


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise Unsupported(f"an input is not dense but {leaf.layout}")
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.is_conj()
    if isinstance(leaf, _PLAIN):
        return type(leaf), leaf
    raise Unsupported(f"an argument is a {type(leaf).__name__}, an arbitrary object")


def _autocast_key() -> Hashable:
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )


MOST_PLANS = 64  # Arbitrary: bounds the memory for plans of a module called with ever new sizes.
_OTHER_THREAD = (
    "inputs of a new size arrived in a thread that did not optimize the model. torch.export patches the "
    "calls of all modules while it runs, so plans are made only in that thread: call the model there once "
    "with each size before it serves from other threads"
)
_CAPTURED: weakref.WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Captured | str]]
_CAPTURED = weakref.WeakKeyDictionary()
_ONE_CAPTURE = threading.RLock()
_CAPTURING = threading.local()
_PLANNED: weakref.WeakValueDictionary[int, Planned] = weakref.WeakValueDictionary()


class Planned:
    """The plans of one module, used by its forward while a technique is on.

    `notes` explain what could not be planned. Calls in training mode or with inputs that require gradients
    run the original forward; others run without gradients.
    """

    def __init__(self, module: nn.Module, *, inside: bool = False) -> None:
        self.notes: dict[str, str] = {}
        self._module = module
        self._inside = inside
        self._on: dict[str, Mapping[str, Any]] = {}
        self._plans: OrderedDict[Hashable, Program | PartsProgram | None] = OrderedDict()
        self._swapped: Swapped | None = None
        self._children: dict[str, Planned] = {}
        self._thread = threading.get_ident()

    @classmethod
    def of(cls, module: nn.Module) -> Planned:
        """Return the module's plans, created if needed."""
        found = _PLANNED.get(id(module))
        if found is None:
            found = _PLANNED[id(module)] = cls(module)
        return found

    @classmethod
    def known(cls, module: nn.Module) -> Planned | None:
        """Return the module's plans, or None if no technique is on."""
        found = _PLANNED.get(id(module))
        return found if found is not None and found._on else None

    def switch_on(self, technique: str, options: Mapping[str, Any]) -> Switch:
        """Switch a technique on."""
        with _ONE_CAPTURE:
            if self._swapped is None:
                self._swapped = Swapped(self._module, self._wrap)
            self._on[technique] = options
            self._plans.clear()
            for child in self._children.values():
                child.switch_on(technique, options)
        return Switch(self, technique)

    def switch_off(self, technique: str) -> None:
        """Switch a technique off. The last one restores the original forward."""
        with _ONE_CAPTURE:
            self._on.pop(technique, None)
            self._plans.clear()
            for child in self._children.values():
                child.switch_off(technique)
            if not self._on and self._swapped is not None:
                self._swapped.revert()
                self._swapped = None
                self._children.clear()

    def program(self, *args: Any, **kwargs: Any) -> Program | PartsProgram | None:
        """Return the plan for such a call, or None, with the reason in `notes`."""
        return self._program(*leaves_of(args, kwargs))

    @property
    def peak_bytes(self) -> int | None:
        """Peak bytes of all planned calls, or None if a call has no plan."""
        if not self._plans or any(plan is None for plan in self._plans.values()):
            return None
        return max(plan.peak_bytes for plan in self._plans.values() if plan is not None)

    def reasons(self) -> tuple[str, ...]:
        """Explain which modules could not be planned as a whole, and why."""
        return tuple(
            f"{name} is planned module by module, since {reason}"
            for name, reason in self.notes.items()
        )

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._call, forward)

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._passes():
            return forward(*args, **kwargs)
        leaves, spec = leaves_of(args, kwargs)
        if torch.is_grad_enabled() and (self._inside or _want_gradients(leaves)):
            return forward(*args, **kwargs)
        with torch.no_grad():
            program = self._program(leaves, spec)
            if program is None:
                return forward(*args, **kwargs)
            tensors = tensors_of(self._module, program.captured)
            with _without_autocast():
                results = program.run(leaves, tensors)
            return pytree.tree_unflatten(results, program.captured.returns)

    def _passes(self) -> bool:
        """True if the original forward must run."""
        if self._module.training or not self._on or getattr(_CAPTURING, "now", False):
            return True
        return torch.compiler.is_compiling()

    def _program(self, leaves: list[Any], spec: pytree.TreeSpec) -> Program | PartsProgram | None:
        try:
            key = self._key(leaves, spec)
        except Unsupported as error:
            self._cannot(str(error))
            return None
        with _ONE_CAPTURE:
            if key in self._plans:
                self._plans.move_to_end(key)
            elif threading.get_ident() != self._thread:
                self._cannot(_OTHER_THREAD)
                return None
            else:
                self._plans[key] = self._made(key, leaves, spec)
                while len(self._plans) > MOST_PLANS:
                    self._plans.popitem(last=False)
            return self._plans[key]

    def _made(
        self, key: Hashable, leaves: list[Any], spec: pytree.TreeSpec
    ) -> Program | PartsProgram | None:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        captured = captured_of(self._module, key, args, kwargs)
        if isinstance(captured, str):
            self._cannot(captured)
            self._plan_children()
            return None
        return self._planned(captured, leaves, spec)

    def _planned(
        self, captured: Captured, leaves: list[Any], spec: pytree.TreeSpec
    ) -> Program | PartsProgram:
        on = self._on
        switches = Switches("release" in on, "in_place" in on, "arena" in on)
        parts = int(on.get("split_batch", {}).get("parts", 1))
        if parts < 2:
            return Program(captured, switches)

        def recapture(part: Sequence[Any]) -> Captured:
            args, kwargs = pytree.tree_unflatten(part, spec)
            found = captured_of(self._module, self._key(list(part), spec), args, kwargs)
            if isinstance(found, str):
                raise Unsupported(found)
            return found

        try:
            return PartsProgram(captured, leaves, parts, switches, recapture)
        except Unsupported as error:
            self.notes["split_batch"] = str(error)
            return Program(captured, switches)

    def _key(self, leaves: list[Any], spec: pytree.TreeSpec) -> Hashable:
        return signature_of(leaves, spec), plain_state(self._module), _devices(self._module)

    def _cannot(self, reason: str) -> None:
        self.notes[type(self._module).__name__] = reason

    def _plan_children(self) -> None:
        for path, child in _callable_children(self._module):
            if path in self._children or id(child) in _PLANNED:
                continue
            planned = Planned(child, inside=True)
            with contextlib.suppress(TorchtrimError):
                for technique, options in self._on.items():
                    planned.switch_on(technique, options)
                planned.notes = self.notes
                _PLANNED[id(child)] = self._children[path] = planned


class Switch:
    """A technique that is on."""

    def __init__(self, planned: Planned, technique: str) -> None:
        self.planned = planned
        self._technique = technique

    def revert(self) -> None:
        """Switch the technique off."""
        self.planned.switch_off(self._technique)


def captured_of(
    module: nn.Module, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Captured | str:
    """Return the module's graph for a call, or the reason for its absence. Cached while the module lives."""
    known = _CAPTURED.setdefault(module, OrderedDict())
    if key not in known:
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as pool:
            known[key] = pool.submit(
                context.run, _captured, module, args, kwargs, _autocast()
            ).result()
        while len(known) > MOST_PLANS:
            known.popitem(last=False)
    return known[key]


def _captured(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: tuple[Any, ...]
) -> Captured | str:
    """Capture in a new thread, without the caller's recorder, modes and gradients."""
    _CAPTURING.now = True
    try:
        with contextlib.ExitStack() as stack:
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            return capture(module, args, kwargs)
    except Unsupported as error:
        return str(error)


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def _want_gradients(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _devices(module: nn.Module) -> Hashable:
    return tuple((p.device, p.dtype, tuple(p.shape)) for p in module.parameters())


def _callable_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield callable children, also in lists of modules, but not torch's own layers (single operators)."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child, f"{path}.")
        elif next(child.children(), None) is not None or not _of_torch(child):
            yield path, child


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules")


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Disable autocast, whose casts are part of the graph."""
    with contextlib.ExitStack() as stack:
        for kind, _ in _autocast():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
