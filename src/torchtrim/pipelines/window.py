"""Runs one stage of a model: the model's own forward, begun and left where its cuts say.

Nothing of the model is rewritten. Modules before the stage give back a stand-in without values, the first of
the stage gets what the stage before sent, and the module with which the next stage begins is never called.
What the model computes between its modules, such as masks and positions, each stage computes for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchtrim.errors import ApplyFailed
from torchtrim.executor.handles import Handles
from torchtrim.executor.swap import Swapped


class TensorMeta(NamedTuple):
    """A tensor without values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The tensor's."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def stand_in(self) -> Tensor:
        """A tensor of that kind that no result may depend on: not a number, where it can be."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.full(self.shape, float("nan"), dtype=self.dtype, device=self.device)
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Shapes(NamedTuple):
    """What a pass of the whole model showed: what goes into each later stage, and what comes out at the end.

    `made`: what each module gave that a stage after it has to stand in for; a tree of `Meta`, or None for
    one that each stage calls itself. `outputs` is a tree too. `homes`: the stage of each module.
    """

    received: tuple[TensorMeta, ...]
    outputs: Any
    made: dict[str, Any]
    homes: dict[str, int]


class _Reached(BaseException):
    """Raised in the model's forward when the next stage would begin, with what goes there."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class _RunningModule:
    """A stage that runs now: from the module `first`, empty for the beginning, to before `end`."""

    def __init__(self, first: str, end: str, received: Tensor | None, shapes: Shapes) -> None:
        self.first, self.end = first, end
        self.received = received
        self.shapes = shapes
        self.begun = not first


class _Recording:
    """A pass of the whole model in which shapes are recorded."""

    def __init__(self) -> None:
        self.received: dict[str, TensorMeta] = {}
        self.made: dict[str, Any] = {}
        self.homes: dict[str, int] = {}


class Window:
    """A model that runs as a whole, or as any one of its stages. `close` makes it what it was.

    `cuts` are the modules, paths below the root, before which a new stage begins. `forward` is the root's
    own where another has its place.
    """

    def __init__(
        self, root: nn.Module, cuts: Sequence[str], forward: Callable[..., Any] | None = None
    ) -> None:
        self._cuts = tuple(cuts)
        self.root_forward: Callable[..., Any] = forward or root.forward
        self._now: _RunningModule | _Recording | None = None
        self.root = root
        self._check()
        self.pieces = tuple(_pieces(root, self._cuts))
        self._handles = Handles()
        try:
            for path in self.pieces:
                wrap = functools.partial(self._wrapped, path)
                self._handles.add(Swapped(root.get_submodule(path), wrap))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Make the model what it was."""
        self._handles.revert()

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self._cuts) + 1

    def own(self, stage: int, shapes: Shapes) -> list[nn.Module]:
        """The modules of a stage; those that are never called are the first one's."""
        return [
            self.root.get_submodule(path)
            for path in self.pieces
            if shapes.homes.get(path, 0) == stage
        ]

    def loose(self) -> list[nn.Parameter]:
        """Parameters of the model that are in no module of one stage."""
        inside = {id(p) for path in self.pieces for p in self.root.get_submodule(path).parameters()}
        return [p for p in self.root.parameters() if id(p) not in inside]

    def record(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
        """Run the whole model, and see what goes from stage to stage."""
        recording = _Recording()
        with self._as(recording):
            outputs = self.root_forward(*args, **kwargs)
        missing = [cut for cut in self._cuts if cut not in recording.received]
        if missing:
            raise ApplyFailed(
                f"a stage is to begin with {missing[0]}, and the model did not call that with a "
                f"tensor. Plan again."
            )
        outputs = pytree.tree_map_only(Tensor, TensorMeta.of, outputs)
        return Shapes(
            tuple(recording.received[cut] for cut in self._cuts),
            outputs,
            recording.made,
            recording.homes,
        )

    def run(
        self,
        stage: int,
        received: Tensor | None,
        shapes: Shapes,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one stage: the tensor that goes to the next, or what the model gives at the end."""
        first = self._cuts[stage - 1] if stage else ""
        end = self._cuts[stage] if stage < len(self._cuts) else ""
        running = _RunningModule(first, end, received, shapes)
        graded = torch.is_grad_enabled()
        try:
            with self._as(running):
                torch.set_grad_enabled(graded and running.begun)
                given = self.root_forward(*args, **kwargs)
        except _Reached as reached:
            return reached.tensor
        finally:
            torch.set_grad_enabled(graded)
        if end or not running.begun:
            raise ApplyFailed(
                f"the model returned before it called {end or first}, where a stage is to "
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
                return _recorded(now, path, path in self._cuts, forward, args, kwargs)
            if now is None:
                return forward(*args, **kwargs)
            return self._run_piece(now, path, forward, args, kwargs)

        return call

    def _run_piece(
        self,
        now: _RunningModule,
        path: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
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

    def _check(self) -> None:
        """Raises `ApplyFailed` for cuts that are no modules, or in another order."""
        order = {path: number for number, (path, _) in enumerate(self.root.named_modules())}
        unknown = [cut for cut in self._cuts if cut not in order]
        if unknown or not all(self._cuts) or len(set(self._cuts)) < len(self._cuts):
            name = unknown[0] if unknown else "one twice"
            raise ApplyFailed(
                f"the plan cuts {type(self.root).__name__} before {name!r}, and there is no such module. "
                "Plan again for this model."
            )


def _is_meta(value: Any) -> bool:
    return isinstance(value, TensorMeta)


def _recorded(
    now: _Recording,
    path: str,
    is_cut: bool,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if is_cut and args and isinstance(args[0], Tensor):
        now.received[path] = TensorMeta.of(args[0])
    stage = now.homes.setdefault(path, len(now.received))
    depends = _is_trained((args, kwargs))
    given = forward(*args, **kwargs)
    depends = depends or _is_trained(given)
    if depends and stage != len(now.received):
        raise ApplyFailed(
            f"{path} is called in stage {stage} and again in stage {len(now.received)}, and its parameters "
            "can be in one only. Plan again."
        )
    now.made[path] = pytree.tree_map_only(Tensor, TensorMeta.of, given) if depends else None
    return given


def _is_trained(tree: Any) -> bool:
    return any(isinstance(one, Tensor) and one.requires_grad for one in pytree.tree_leaves(tree))


def _pieces(root: nn.Module, cuts: Sequence[str]) -> Iterator[str]:
    """The largest modules that no cut is inside of, in the order in which they are registered."""
    around = {cut.rpartition(".")[0] for cut in cuts}
    opened = {""}
    for path in around:
        while path:
            opened.add(path)
            path = path.rpartition(".")[0]
    yield from _under(root, "", opened)


def _under(module: nn.Module, path: str, opened: set[str]) -> Iterator[str]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if below in opened or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _under(child, below, opened)
        else:
            yield below
