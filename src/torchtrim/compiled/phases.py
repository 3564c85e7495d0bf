"""The phases of a step that compiles: the forward and the backward of each call, and what runs in between.

A run of the compiled code marks where each begins, so that the allocator's peak is known for each.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from torchtrim.capture.allocator import mark_phase
from torchtrim.compiled.inductor import compiled_node
from torchtrim.compiled.memory import UPDATE, Event, after, name_of


def on_backward(results: Any, begins: Callable[[], None]) -> None:
    """Have `begins` called when backward reaches the call that returned these; once for each result."""

    def hook(_: torch.Tensor) -> None:
        begins()

    for value in _differentiable(results):
        value.register_hook(hook)  # type: ignore[no-untyped-call]


def _differentiable(results: Any) -> Iterator[torch.Tensor]:
    """Yield the results that a graph has computed with gradients."""
    for value in tree_leaves(results):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            yield value


class PhaseMarks:
    """Marks of a step's phases for the allocator's watch."""

    def __init__(self) -> None:
        self._calls = 0

    @contextlib.contextmanager
    def updates(self) -> Iterator[None]:
        """Mark where optimizers step."""
        handle = register_optimizer_step_pre_hook(lambda *_: mark_phase(UPDATE))
        try:
            yield
        finally:
            handle.remove()

    def begin(self) -> None:
        """Begin a step."""
        self._calls = 0

    def marked(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled graph's function that marks its calls and their backwards."""

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            event = Event(self._calls)
            self._calls += 1
            mark_phase(name_of(event))
            results = compiled(*args)
            mark_phase(after(name_of(event)))
            _mark_backward(results, name_of(event._replace(backward=True)))
            return results

        return call


def _mark_backward(results: Any, name: str) -> None:
    """Mark where it begins, not where it ends: a hook there would keep the gradients that it is given."""
    node = next(filter(None, map(compiled_node, _differentiable(results))), None)
    if node is not None:
        node.register_prehook(lambda *_: mark_phase(name))


def above(measured: Mapping[str, int], simulated: Mapping[str, int]) -> dict[str, int]:
    """Return by how many bytes each phase was measured higher than it was simulated.

    Without a measured peak of each phase that was simulated, nothing is known of any.
    """
    if {*measured} - {*simulated} or not measured:
        return {}
    return {name: measured[name] - simulated[name] for name in measured}
