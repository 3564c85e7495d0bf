"""Checks of a planned step inside itself: one region's call also runs as it was, on the same inputs."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from torchtrim.capture.snapshot import random_state, set_random_state
from torchtrim.core.clock import now
from torchtrim.evidence.attributes import attributes
from torchtrim.evidence.evidence import random_states
from torchtrim.executor.swap import Swapped
from torchtrim.records.plan import Plan


class RegionResult(NamedTuple):
    """Values of a region by name, each of the planned call and of the call as it was."""

    name: str
    pairs: dict[str, tuple[Any, Any]]


class Regions:
    """The regions of a plan: the modules that its techniques name, in turn."""

    def __init__(self, plan: Plan, roots: Mapping[str, nn.Module]) -> None:
        self._roots = roots
        places = dict.fromkeys(where for one in plan.techniques for where in one.where)
        self._turn = itertools.cycle(places)
        self._count = len(places)

    def next(self) -> Region | None:
        """Return the next region whose module exists, None if there is none."""
        for _ in range(self._count):
            if (found := _module_of(self._roots, next(self._turn))) is not None:
                return Region(*found, self._roots)
        return None


def _module_of(roots: Mapping[str, nn.Module], where: str) -> tuple[str, nn.Module] | None:
    """Return the innermost module of a place, and its path."""
    found: tuple[str, nn.Module] | None = None
    for name, root in roots.items():
        for path, module in root.named_modules():
            whole = f"{name}.{path}" if path else name
            inside = where == whole or where.startswith((f"{whole}.", f"{whole}[", f"{whole}:"))
            if inside and (found is None or len(whole) > len(found[0])):
                found = whole, module
    return found


class Region:
    """One module during a step: its first call with gradients, and the same call without the plan.

    A copy of the module, which has no plan, runs on copies of the inputs with the same random numbers, so the
    run needs this region's parameters and activations twice. After backward, `result` compares outputs,
    gradients of inputs and parameters, buffers and attributes. Parameters that other modules use too,
    and those whose gradients a technique takes early, are left out.
    """

    def __init__(self, name: str, module: nn.Module, roots: Mapping[str, nn.Module]) -> None:
        self.name = name
        self._module = module
        self._copy: nn.Module | None = None
        self._calls = 0
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._grads: dict[int, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor | None] = {}
        self._pairs: dict[str, tuple[Any, Any]] = {}
        self.seconds = 0.0
        own = {id(one) for one in module.modules()}
        outside = Counter(
            id(parameter)
            for root in roots.values()
            for one in root.modules()
            if id(one) not in own
            for parameter in one._parameters.values()
        )
        self._parameters = {
            path: one for path, one in module.named_parameters() if not outside[id(one)]
        }
        self._swapped = Swapped(module, self._around)

    def end(self) -> None:
        """Leave the module as it was planned."""
        self._swapped.revert()

    def _around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls += torch.is_grad_enabled()
            if self._calls != 1 or self._copy is not None or not torch.is_grad_enabled():
                return run(*args, **kwargs)
            begin = now()
            try:
                self._copy = copy.deepcopy(self._module)
            except RuntimeError:  # an attribute is part of a graph
                return run(*args, **kwargs)
            self.seconds += now() - begin
            return self._both(self._copy, run, args, kwargs)

        return call

    def _both(self, plain: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._before = {
            path: None if one.grad is None else one.grad.clone()
            for path, one in self._parameters.items()
        }
        given = tree_map(self._shared, (args, kwargs))
        copies = iter([one for _, one in self._inputs])
        taken = tree_map(lambda one: next(copies) if isinstance(one, torch.Tensor) else one, given)
        before = random_state()
        result = run(*given[0], **given[1])
        drawn = [*random_states()]
        begin, after = now(), random_state()
        set_random_state(before)
        try:
            again = plain(*taken[0], **taken[1])
            self._pairs["random numbers"] = drawn, [*random_states()]
        finally:
            set_random_state(after)
            self.seconds += now() - begin
        for number, (one, other) in enumerate(zip(_tensors(result), _tensors(again), strict=False)):
            self._pairs[f"output {number}"] = one.detach().clone(), other.detach()
            if one.requires_grad and other.requires_grad:
                one.register_hook(functools.partial(self._graded, number))  # type: ignore[no-untyped-call]
                self._outputs.append((one, other))
        return result

    def _shared(self, value: Any) -> Any:
        """Return an alias of an input, whose gradient is of this call alone, and note a copy of it."""
        if not isinstance(value, torch.Tensor):
            return value
        alias = value.view_as(value) if value.requires_grad else value
        if alias.requires_grad:
            alias.retain_grad()
        own = value.detach().clone().requires_grad_(value.requires_grad)
        self._inputs.append((alias, own))
        return alias

    def _graded(self, number: int, grad: torch.Tensor) -> None:
        known = self._grads.get(number)
        self._grads[number] = grad.detach().clone() if known is None else known + grad.detach()

    def result(self) -> RegionResult | None:
        """Return the values to compare after backward, None if it did not reach this region's call."""
        if self._copy is None or not self._grads:
            return None
        again = self._copy
        inputs = [pair for pair in self._inputs if pair[1].requires_grad]
        names = [path for path in self._parameters if again.get_parameter(path).requires_grad]
        wanted = [own for _, own in inputs] + [again.get_parameter(path) for path in names]
        reached = [
            (other, self._grads[number])
            for number, (_, other) in enumerate(self._outputs)
            if number in self._grads
        ]
        kept, begin = random_state(), now()
        outputs, weights = zip(*reached, strict=True)
        grads = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
        set_random_state(kept)
        self.seconds += now() - begin
        pairs = dict(self._pairs)
        for number, ((alias, _), grad) in enumerate(zip(inputs, grads, strict=False)):
            if grad is not None and alias.grad is not None:
                pairs[f"gradient of input {number}"] = alias.grad, grad
        if self._calls == 1:
            pairs |= self._of_parameters(names, grads[len(inputs) :])
            pairs |= _left(self._module, again)
        return RegionResult(self.name, pairs)

    def _of_parameters(
        self, names: list[str], grads: tuple[torch.Tensor | None, ...]
    ) -> dict[str, tuple[Any, Any]]:
        found = {}
        for path, grad in zip(names, grads, strict=True):
            mine, before = self._parameters[path].grad, self._before[path]
            if type(mine) is torch.Tensor and grad is not None:
                found[f"gradient of {path}"] = mine, grad if before is None else before + grad
        return found


def _left(module: nn.Module, again: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the buffers and attributes that both leave."""
    buffers = dict(again.named_buffers())
    found: dict[str, tuple[Any, Any]] = {
        f"buffer {path}": (one, buffers.get(path)) for path, one in module.named_buffers()
    }
    mine, others = (dict(attributes(one.named_modules())) for one in (module, again))
    return found | {f"attribute {name}": (mine[name], others.get(name)) for name in mine}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
