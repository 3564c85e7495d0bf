"""Times each action of a pipeline by running its stages in one process.

A backward split in two costs more than a whole one: both halves read a layer's inputs, torch searches the
graph for each micro-batch, and each group of parameters has a separate backward. So it is measured, with
torch's own functions. See `torch.distributed.pipelining.stage._PipelineStageBase`.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from torchtrim.pipelines.engine import Engine, PipelineStep, StageModule, part_loss, recorded
from torchtrim.pipelines.promise import PromisedCall
from torchtrim.pipelines.window import Shapes, Window
from torchtrim.records.pipeline import Pipeline, StageSeconds

_ROUNDS = 7  # One that warms up, and six for a median.
_PATIENCE = 15.0  # Arbitrary; as long as a person waits. A slow model has fewer rounds.
_Notes = defaultdict[tuple[str, int], list[float]]
StageTimes = Callable[[list[tuple[StageSeconds, ...]]], None]


class ActionClocks:
    """An executor that times the actions of several pipelines and adds no gradients; calls `told` once.

    Rounds over the pipelines alternate, so that noise hits all of them. The first round is a warm-up; it
    counts for a pipeline only if time ran out before another.
    """

    def __init__(self, window: Window, pipelines: Sequence[Pipeline], told: StageTimes) -> None:
        self._window = window
        self._pipelines = pipelines
        self._told = told
        self._shapes: dict[tuple[tuple[str, ...], int], Shapes] = {}

    def prepare(self, shapes: Shapes) -> None:
        """Do nothing: each pipeline is cut in its own round."""

    def run(self, step: PipelineStep, numbers: Sequence[PromisedCall]) -> Sequence[Tensor]:
        """Time all pipelines on the step's first micro-batches; return zeros for the numbers."""
        notes: list[_Notes] = [defaultdict(list) for _ in self._pipelines]
        both = list(zip(self._pipelines, notes, strict=True))
        until = time.monotonic() + _PATIENCE
        for number, (pipeline, one) in itertools.product(range(_ROUNDS), both):
            if number and time.monotonic() > until:
                break
            if number == 1:
                one.clear()
            self._round(step, pipeline, one)
        self._told([_medians(one, len(pipeline.cuts) + 1) for pipeline, one in both])
        return [torch.zeros((), dtype=torch.float32, device="cpu") for _ in numbers]

    def _round(self, step: PipelineStep, pipeline: Pipeline, notes: _Notes) -> None:
        window = Window(self._window.root, pipeline.cuts, self._window.root_forward)
        try:
            count = pipeline.microbatches * pipeline.replicas
            key = pipeline.cuts, count
            if key not in self._shapes:
                self._shapes[key] = recorded(window, step.given.rows(0, count))
            shapes = self._shapes[key]
            stages = [StageModule(window, pipeline, n, shapes) for n in range(window.count)]
            step = step._replace(shapes=shapes)
            for stage in stages:
                stage.begin(step)
            passed = _Passed(step, stages, count, notes)
            passed.whole()
            if not any(stage.recompute for stage in pipeline.stages):
                passed.split()
        finally:
            window.close()


class _Passed:
    """A timed forward and backward of one micro-batch through all stages."""

    def __init__(
        self, step: PipelineStep, stages: Sequence[StageModule], count: int, notes: _Notes
    ) -> None:
        self._step, self._stages, self._count, self._notes = step, stages, count, notes

    def whole(self) -> None:
        passes, grads = self._forward(), None
        for number, (received, sent) in reversed([*enumerate(passes)]):
            with self._clocked("B", number):
                grads = _whole(sent, grads, received)

    def split(self) -> None:
        """Run forward, then backward for inputs, then for weights; the first stage's backward is whole."""
        passes, grads = self._forward(), None
        groups: dict[int, list[dict[str, Any]]] = {}
        for number in range(len(passes) - 1, 0, -1):
            received, sent = passes[number]
            with self._clocked("I", number):
                weights = self._stages[number].parameters()
                known = None if grads is None else [one for one in grads if one is not None]
                grads, groups[number] = stage_backward_input([sent], known, received, weights)
        for number, group in groups.items():
            with self._clocked("W", number):
                stage_backward_weight(self._stages[number].parameters(), group)
        received, sent = passes[0]
        with self._clocked("W", 0):
            _whole(sent, grads, received)

    def _forward(self) -> list[tuple[list[Tensor], Tensor]]:
        """Return each stage's input and output; the last output is the loss."""
        tensors = self._step.given.rows(0, self._count).tensors()
        passes: list[tuple[list[Tensor], Tensor]] = []
        received: list[Tensor] = []
        for number, stage in enumerate(self._stages):
            with self._clocked("F", number):
                sent = stage.of_batch(0, received[0] if received else None, tensors)
                if number == len(self._stages) - 1:
                    sent, _ = part_loss(self._step, sent, 0, self._count, [])
            passes.append((received, sent))
            arrived = sent.detach()
            received = [arrived.requires_grad_(arrived.is_floating_point())]
        return passes

    @contextlib.contextmanager
    def _clocked(self, kind: str, stage: int) -> Iterator[None]:
        """Note the block's seconds: CPU time if there is one thread, since it excludes other work."""
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        yield
        self._notes[kind, stage].append(clock() - begin)


def _whole(
    sent: Tensor, grads: Sequence[Tensor | None] | None, received: list[Tensor]
) -> tuple[Tensor | None, ...]:
    return stage_backward(sent if grads is None else (sent,), grads, received)


def _medians(notes: _Notes, stages: int) -> tuple[StageSeconds, ...]:
    middle = {key: statistics.median(values) for key, values in notes.items()}
    return tuple(
        StageSeconds(
            forward=middle["F", stage],
            backward=middle["B", stage],
            inputs=middle.get(("I", stage), 0.0),
            weights=middle.get(("W", stage), 0.0),
        )
        for stage in range(stages)
    )


def clocking(root: nn.Module, pipelines: Sequence[Pipeline], told: StageTimes) -> Engine:
    """Return an engine whose next backward times the pipelines and passes the stages' times to `told`."""
    window = Window(root, pipelines[0].cuts)
    return Engine(root, pipelines[0], ActionClocks(window, pipelines, told), window)
