"""Trains a model in stages: in several processes on torch's schedules, or in one in the same order."""

from __future__ import annotations

import contextlib
import functools
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from torchtrim.errors import Unsupported
from torchtrim.pipelines.promise import (
    Ledger,
    OutputPart,
    PromisedCall,
    numbers_before,
    refuse_sums,
    rows_of,
    samples_of,
    tensors_before,
)
from torchtrim.pipelines.window import Shapes, Window
from torchtrim.records.pipeline import Pipeline

_mode_stack: Callable[[], list[Any]] = _get_current_function_mode_stack
_SEED = 1_000_003  # A prime: seeds of neighbouring stages and steps do not meet.
_MOST_SUM = 2**20  # Then sums of squared checksums over all ranks are exact in float64.


class StepInputs(NamedTuple):
    """A call of the model: its flattened arguments and the batch size."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    batch: int

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> StepInputs:
        """Flatten a call's arguments. Raises `Unsupported` if they hold no batch."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        batch = samples_of(one for one in leaves if isinstance(one, Tensor))
        if not batch:
            raise Unsupported(
                "the model is called without a tensor, so no batch can be split into micro-batches."
            )
        return cls(tuple(leaves), spec, batch)

    def rows(self, number: int, count: int) -> StepInputs:
        """Return the call for part `number` of `count` equal parts of the batch."""
        parts = [
            rows_of(one, self.batch, number, count) if isinstance(one, Tensor) else one
            for one in self.leaves
        ]
        return StepInputs(tuple(parts), self.spec, self.batch // count)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors split along the batch, by the keyword under which stages receive them."""
        return {
            f"given_{number}": one
            for number, one in enumerate(self.leaves)
            if isinstance(one, Tensor) and one.dim() and one.shape[0] % self.batch == 0
        }

    def called(self, tensors: dict[str, Tensor]) -> tuple[Any, Any]:
        """Return the call's arguments with these tensors in place of the batch's."""
        leaves = [tensors.get(f"given_{number}", one) for number, one in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def key(self) -> tuple[Any, ...]:
        """Return the shapes and dtypes, as a cache key."""
        return tuple(
            (tuple(one.shape), one.dtype) if isinstance(one, Tensor) else str(one)
            for one in self.leaves
        )


class PipelineStep(NamedTuple):
    """A running step: its number, the call, shapes of a micro-batch, the loss, and autocast and modes."""

    number: int
    given: StepInputs
    shapes: Shapes
    loss: PromisedCall
    around: Callable[[], contextlib.AbstractContextManager[None]]


def checksum(step: PipelineStep) -> float:
    """Return a checksum of the step's inputs and targets, as a small integer."""
    given = (one for one in step.given.leaves if isinstance(one, Tensor))
    sums = [float(one.detach().double().sum()) for one in (*given, *tensors_before(step.loss))]
    return float(zlib.crc32(struct.pack(f"{len(sums)}d", *sums)) % _MOST_SUM)


class Executor(Protocol):
    """Runs a step's forward and backward. `numbers`: the scalars leading to the loss."""

    def prepare(self, shapes: Shapes) -> None:
        """Set up the stages. Called once, when each module's stage is known."""
        ...

    def run(self, step: PipelineStep, numbers: Sequence[PromisedCall]) -> Sequence[Tensor]:
        """Accumulate the step's gradients; return the means of the numbers over all micro-batches."""
        ...


class Engine:
    """A model with stand-in outputs, whose backward runs the pipeline."""

    def __init__(
        self, root: nn.Module, pipeline: Pipeline, executor: Executor, window: Window
    ) -> None:
        self._root = root
        self._pipeline = pipeline
        self._executor = executor
        self._window = window
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, tuple[Shapes, Any]] = {}
        self._steps = 0
        self._prepared = False

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that runs the model in stages."""

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                raise Unsupported(
                    f"{type(self._root).__name__} is called without gradients, and in a pipeline no rank has "
                    "all of it. Evaluate in a separate run, without --plan, from a checkpoint."
                )
            return self._promised(StepInputs.of(args, kwargs))

        return call

    def _promised(self, given: StepInputs) -> Any:
        share = self._pipeline.microbatches * self._pipeline.replicas
        if given.batch % share:
            raise Unsupported(
                f"a batch of {given.batch} samples does not divide into {share} equal parts "
                f"({self._pipeline.microbatches} micro-batches x {self._pipeline.replicas} replicas). If it "
                "is the last of an epoch, give the loader drop_last=True; else plan again for this size."
            )
        shapes, fakes = self._shapes(given, share)
        self._steps += 1
        around, number = _surroundings(), self._steps

        def run(node: PromisedCall) -> None:
            refuse_sums(node)
            numbers = numbers_before(node)
            step = PipelineStep(number, given, shapes, node, around)
            values = self._executor.run(step, numbers)
            for one, value in zip(numbers, values, strict=True):
                one.value = value

        return Ledger(given.batch, run, self._mode).outputs(fakes)

    def _shapes(self, given: StepInputs, share: int) -> tuple[Shapes, Any]:
        if given.key() not in self._known:
            part = given.rows(0, share)
            shapes = recorded(self._window, part, self._mode)
            with self._mode, torch.random.fork_rng():
                args, kwargs = _fake(given, self._mode)
                whole = self._window.root_forward(*args, **kwargs)
            self._known[given.key()] = shapes, whole
            if not self._prepared:
                self._prepared = True
                self._executor.prepare(shapes)
        return self._known[given.key()]


def recorded(window: Window, part: StepInputs, mode: FakeTensorMode | None = None) -> Shapes:
    """Infer the shapes between stages for a micro-batch, on fake tensors."""
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.random.fork_rng():
        args, kwargs = _fake(part, mode)
        return window.record(args, kwargs)


def _fake(given: StepInputs, mode: FakeTensorMode) -> tuple[Any, Any]:
    leaves = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in given.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, given.spec)
    return args, kwargs


def _surroundings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Capture the active autocast settings and function modes, to be re-entered later."""
    kinds = [one for one in ("cpu", "cuda") if torch.is_autocast_enabled(one)]
    devices = [(one, torch.get_autocast_dtype(one)) for one in kinds]
    modes = _mode_stack()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype in devices:
                stack.enter_context(torch.autocast(device, dtype))
            now = _mode_stack()
            for mode in modes:
                if not any(mode is one for one in now):
                    stack.enter_context(mode)
            yield

    return entered


class StageModule(nn.Module):
    """One stage as a module, from the previous stage's output and the batch's own rows to its result.

    `begin` sets the step; micro-batches then arrive in order.
    """

    def __init__(self, window: Window, pipeline: Pipeline, number: int, shapes: Shapes) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(window.own(number, shapes))
        for place, parameter in enumerate(window.loose()):
            self.register_parameter(f"loose_{place}", parameter)
        stages = pipeline.stages
        self._again = bool(stages) and stages[number].recompute
        self._number = number
        self.__dict__["_window"] = window
        self._batch = 0
        self._step: PipelineStep | None = None

    def begin(self, step: PipelineStep, first: int = 0) -> None:
        """Set the next step, and the number of the first micro-batch of this rank."""
        self._step, self._batch = step, first

    def forward(self, *received: Tensor, **tensors: Tensor) -> Any:
        """Return the stage's result for the next micro-batch."""
        self._batch += 1
        return self.of_batch(self._batch - 1, received[0] if self._number else None, tensors)

    def of_batch(self, batch: int, received: Tensor | None, tensors: dict[str, Tensor]) -> Any:
        """Return the stage's result for micro-batch number `batch`."""
        assert self._step is not None
        if self._again:
            return checkpoint(self._run, batch, received, tensors, use_reentrant=False)
        return self._run(batch, received, tensors)

    def _run(self, batch: int, received: Tensor | None, tensors: dict[str, Tensor]) -> Any:
        step = self._step
        assert step is not None
        args, kwargs = step.given.called(tensors)
        with _random_numbers(step.number, self._number, batch), step.around():
            given = self.__dict__["_window"].run(self._number, received, step.shapes, args, kwargs)
        leaves = [one for one in pytree.tree_leaves(given) if isinstance(one, Tensor)]
        return leaves[0] if len(leaves) == 1 else tuple(leaves)


@contextlib.contextmanager
def _random_numbers(step: int, stage: int, batch: int) -> Iterator[None]:
    """Seed each micro-batch and stage the same on any rank; the script's random state is unaffected."""
    with torch.random.fork_rng():
        torch.manual_seed(torch.initial_seed() + _SEED * (step * 4096 + stage) + batch)
        yield


def part_loss(
    step: PipelineStep, outputs: Any, number: int, count: int, numbers: Sequence[PromisedCall]
) -> Any:
    """Return the loss of one micro-batch, divided by their count, and the values of the numbers."""
    leaves = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    part = OutputPart(leaves, number, count)
    with step.around():
        loss = part.value(step.loss)
    return loss / count, [part.value(one).detach() for one in numbers]
