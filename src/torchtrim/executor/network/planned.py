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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchtrim.dispatch.threads import OURS
from torchtrim.errors import TorchtrimError, Unsupported
from torchtrim.executor.network.capture import PLAIN_TYPES, capture, plain_state
from torchtrim.executor.network.captured import Captured
from torchtrim.executor.network.parts import PartsProgram, PlannedProgram
from torchtrim.executor.network.program import NetworkProgram, Switches, tensors_of
from torchtrim.executor.registry import Undo
from torchtrim.executor.swap import Swapped


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise Unsupported(f"an input is not dense but {leaf.layout}")
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.is_conj()
    if isinstance(leaf, PLAIN_TYPES):
        return type(leaf), leaf
    raise Unsupported(f"an argument is a {type(leaf).__name__}, an arbitrary object")


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
        self._plans: OrderedDict[Hashable, PlannedProgram | None] = OrderedDict()
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

    def switch_on(self, technique: str, options: Mapping[str, Any]) -> Undo:
        """Switch a technique on."""
        with _ONE_CAPTURE:
            if self._swapped is None:
                self._swapped = Swapped(
                    self._module, lambda run: functools.partial(self._call, run)
                )
            self._on[technique] = options
            self._plans.clear()
            for child in self._children.values():
                child.switch_on(technique, options)
        return Undo(functools.partial(self.switch_off, technique))

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

    def program(self, *args: Any, **kwargs: Any) -> PlannedProgram | None:
        """Return the plan for such a call, or None, with the reason in `notes`."""
        return self._program(*pytree.tree_flatten((args, kwargs)))

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

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_capturing = getattr(_CAPTURING, "now", False) or torch.compiler.is_compiling()
        if self._module.training or not self._on or is_capturing:
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))  # In torch.export's order.
        if torch.is_grad_enabled() and (
            self._inside or any(isinstance(one, Tensor) and one.requires_grad for one in leaves)
        ):
            return forward(*args, **kwargs)
        with torch.no_grad():
            program = self._program(leaves, spec)
            if program is None:
                return forward(*args, **kwargs)
            tensors = tensors_of(self._module, program.captured)
            with _autocasting(_autocast(), enabled=False):  # Its casts are part of the graph.
                results = program.run(leaves, tensors)
            return pytree.tree_unflatten(results, program.captured.returns)

    def _program(self, leaves: list[Any], spec: pytree.TreeSpec) -> PlannedProgram | None:
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
    ) -> PlannedProgram | None:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        captured = captured_of(self._module, key, args, kwargs)
        if isinstance(captured, str):
            self._cannot(captured)
            self._plan_children()
            return None
        switches = Switches(*(name in self._on for name in Switches._fields))
        parts = int(self._on.get("split_batch", {}).get("parts", 1))
        if parts < 2:
            return NetworkProgram(captured, switches)

        def recapture(part: Sequence[Any]) -> Captured:
            args, kwargs = pytree.tree_unflatten(part, spec)
            network = captured_of(self._module, self._key(part, spec), args, kwargs)
            if isinstance(network, str):
                raise Unsupported(network)
            return network

        try:
            return PartsProgram(captured, leaves, parts, switches, recapture)
        except Unsupported as error:
            self.notes["split_batch"] = str(error)
            return NetworkProgram(captured, switches)

    def _key(self, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Hashable:
        """Return the geometry of tensors and the values of other inputs, the modules' state and autocast.

        Raises `Unsupported` for arbitrary objects.
        """
        parameters = ((p.device, p.dtype, tuple(p.shape)) for p in self._module.parameters())
        inputs = spec, tuple(map(_of_leaf, leaves)), _autocast()
        return inputs, plain_state(self._module), tuple(parameters)

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


def captured_of(
    module: nn.Module, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Captured | str:
    """Return the module's graph for a call, or the reason for its absence. Cached while the module lives."""
    known = _CAPTURED.setdefault(module, OrderedDict())
    if key not in known:
        run = contextvars.copy_context().run
        with ThreadPoolExecutor(1, OURS) as pool:
            known[key] = pool.submit(run, _captured, module, args, kwargs, _autocast()).result()
        while len(known) > MOST_PLANS:
            known.popitem(last=False)
    return known[key]


def _captured(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: tuple[Any, ...]
) -> Captured | str:
    """Capture in a new thread, without the caller's recorder, modes and gradients."""
    _CAPTURING.now = True
    try:
        with _autocasting(autocast, enabled=True):
            return capture(module, args, kwargs)
    except Unsupported as error:
        return str(error)


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def _callable_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield callable children, also in lists of modules, but not torch's own layers (single operators)."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child, f"{path}.")
        elif [*child.children()] or not type(child).__module__.startswith("torch.nn.modules"):
            yield path, child


@contextlib.contextmanager
def _autocasting(dtypes: Iterable[tuple[str, torch.dtype]], *, enabled: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, dtype in dtypes:
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
        yield
