"""Runs one stage of a model: the model's own forward between two cuts.

The model is not rewritten. Modules before the stage return stand-in outputs, the stage's first module gets
the previous stage's output, and the next stage's first module is never called. Each stage recomputes what
the model computes between its modules, such as masks and positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Handles
from torchtrim.executor.swap import Swapped, is_traced


class TensorMeta(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Return the metadata of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def stand_in(self) -> Tensor:
        """Return a stand-in that no result may depend on: filled with NaN, or zeros if integer."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.full(self.shape, float("nan"), dtype=self.dtype, device=self.device)
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Shapes(NamedTuple):
    """Shapes recorded in a pass of the whole model: the input of each later stage.

    `made`: each module's output as a tree of `TensorMeta`, or None for a module that every stage calls
    itself. `homes`: the stage of each module.
    """

    received: tuple[TensorMeta, ...]
    made: dict[str, Any]
    homes: dict[str, int]


class _Reached(BaseException):
    """Raised in the model's forward where the next stage begins, with that stage's input."""


@dataclass
class _RunningModule:
    """A running stage: from module `first` (empty: the start of the model) up to module `end`."""

    first: str
    end: str
    received: Tensor | None
    shapes: Shapes
    begun: bool


class _Recording:
    def __init__(self) -> None:
        self.received: dict[str, TensorMeta] = {}
        self.made: dict[str, Any] = {}
        self.homes: dict[str, int] = {}

    def run(
        self, path: str, is_cut: bool, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if is_cut and args and isinstance(args[0], Tensor):
            self.received[path] = TensorMeta.of(args[0])
        stage = self.homes.setdefault(path, len(self.received))
        depends = _is_trained((args, kwargs))
        made = forward(*args, **kwargs)
        depends = depends or _is_trained(made)
        if depends and stage != len(self.received):
            raise ApplyFailed(
                f"{path} is called in stage {stage} and again in stage {len(self.received)}, but its "
                "parameters can be in one stage only. Plan again."
            )
        self.made[path] = pytree.tree_map_only(Tensor, TensorMeta.of, made) if depends else None
        return made


class Window:
    """A model that runs as a whole or as any one of its stages. `close` restores the model.

    `cuts` are the paths of modules that begin a new stage. `forward` is the root's own forward if it was
    replaced.
    """

    def __init__(
        self, root: nn.Module, cuts: Sequence[str], forward: Callable[..., Any] | None = None
    ) -> None:
        self._cuts = tuple(cuts)
        self.root_forward: Callable[..., Any] = forward or root.forward
        self._now: _RunningModule | _Recording | None = None
        self.root = root
        paths = {path for path, _ in root.named_modules()}
        unknown = [cut for cut in self._cuts if cut not in paths]
        if unknown or not all(self._cuts) or len(set(self._cuts)) < len(self._cuts):
            name = unknown[0] if unknown else "one twice"
            raise ApplyFailed(
                f"the plan cuts {type(root).__name__} before {name!r}, but there is no such module. Plan "
                "again for this model."
            )
        self.pieces = tuple(_pieces(root, self._cuts))
        self._handles = Handles()
        try:
            for path in self.pieces:
                wrap = functools.partial(self._wrapped, path)
                self._handles.add(Swapped(root.get_submodule(path), wrap, is_traced))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the model."""
        self._handles.revert()

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self._cuts) + 1

    def own(self, stage: int, shapes: Shapes) -> list[nn.Module]:
        """Return the modules of a stage; modules never called belong to the first."""
        paths = (path for path in self.pieces if shapes.homes.get(path, 0) == stage)
        return [self.root.get_submodule(path) for path in paths]

    def loose(self) -> list[nn.Parameter]:
        """Return the model's parameters that belong to no stage's modules."""
        inside = {id(p) for path in self.pieces for p in self.root.get_submodule(path).parameters()}
        return [p for p in self.root.parameters() if id(p) not in inside]

    def record(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
        """Run the whole model and record the shapes between stages."""
        recording = _Recording()
        with self._as(recording):
            self.root_forward(*args, **kwargs)
        missing = [cut for cut in self._cuts if cut not in recording.received]
        if missing:
            raise ApplyFailed(
                f"a stage should begin with {missing[0]}, but the model did not call it with a tensor. Plan "
                "again."
            )
        received = tuple(recording.received[cut] for cut in self._cuts)
        return Shapes(received, recording.made, recording.homes)

    def run(
        self,
        stage: int,
        received: Tensor | None,
        shapes: Shapes,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one stage: return the tensor for the next stage, or the model's output."""
        first = self._cuts[stage - 1] if stage else ""
        end = self._cuts[stage] if stage < len(self._cuts) else ""
        running = _RunningModule(first, end, received, shapes, begun=not first)
        graded = torch.is_grad_enabled()
        try:
            with self._as(running):
                torch.set_grad_enabled(graded and running.begun)
                given = self.root_forward(*args, **kwargs)
        except _Reached as reached:
            return reached.args[0]
        finally:
            torch.set_grad_enabled(graded)
        if end or not running.begun:
            raise ApplyFailed(
                f"the model returned before it called {end or first}, where a stage should "
                f"{'end' if end else 'begin'}. Its calls depend on its inputs, so it cannot be cut there."
            )
        return given

    @contextmanager
    def _as(self, now: _RunningModule | _Recording) -> Iterator[None]:
        outer, self._now = self._now, now
        try:
            yield
        finally:
            self._now = outer

    def _wrapped(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            now = self._now
            if isinstance(now, _Recording):
                return now.run(path, path in self._cuts, forward, args, kwargs)
            if now is None:
                return forward(*args, **kwargs)
            if now.begun and path == now.end:
                raise _Reached(args[0])
            if path == now.first and not now.begun:
                now.begun = True
                torch.set_grad_enabled(now.received is not None and now.received.requires_grad)
                args = (now.received, *args[1:])
            made = now.shapes.made.get(path)
            if not now.begun and made is not None:
                return pytree.tree_map_only(TensorMeta, TensorMeta.stand_in, made, is_leaf=_is_meta)
            return forward(*args, **kwargs)

        return call


def _is_meta(value: Any) -> bool:
    return isinstance(value, TensorMeta)


def _is_trained(tree: Any) -> bool:
    return any(isinstance(one, Tensor) and one.requires_grad for one in pytree.tree_leaves(tree))


def _pieces(root: nn.Module, cuts: Sequence[str]) -> Iterator[str]:
    """Yield the largest modules without a cut inside, in registration order."""
    opened = {""}
    for path in cuts:
        while path := path.rpartition(".")[0]:
            opened.add(path)
    yield from _under(root, "", opened)


def _under(module: nn.Module, path: str, opened: set[str]) -> Iterator[str]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if below in opened or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _under(child, below, opened)
        else:
            yield below
