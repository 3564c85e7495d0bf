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
from torchtrim.dispatch.frames import uncompiled


def on_backward(results: Any, begins: Callable[[], None]) -> None:
    """Have `begins` called when backward reaches the call that returned these; once for each of its nodes.

    A hook where it ends would keep the gradients that it is given.
    """

    @uncompiled
    def hook(_: Any) -> None:
        begins()

    values = (each for each in tree_leaves(results) if isinstance(each, torch.Tensor))
    for node in {compiled_node(each) or each.grad_fn for each in values}:
        if node is not None:
            node.register_prehook(hook)


class PhaseMarks:
    """Marks of a step's phases for the allocator's watch."""

    def __init__(self) -> None:
        self._calls = 0

    @contextlib.contextmanager
    def updates(self) -> Iterator[None]:
        """Mark where optimizers step."""
        handle = register_optimizer_step_pre_hook(uncompiled(lambda *_: mark_phase(UPDATE)))
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
            backward = name_of(event._replace(backward=True))
            on_backward(results, functools.partial(mark_phase, backward))
            return results

        return call


def above(measured: Mapping[str, int], simulated: Mapping[str, int]) -> dict[str, int]:
    """Return by how many bytes each phase was measured higher than it was simulated.

    Without a measured peak of each phase that was simulated, nothing is known of any.
    """
    if {*measured} - {*simulated} or not measured:
        return {}
    return {name: measured[name] - simulated[name] for name in measured}
