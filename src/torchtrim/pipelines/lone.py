"""Runs a pipeline in one process; gradients of micro-batches accumulate in the schedule's order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtrim.errors import ApplyFailed
from torchtrim.pipelines.engine import Engine, PipelineStep, StageModule, part_loss
from torchtrim.pipelines.orders import order_of
from torchtrim.pipelines.promise import PromisedCall
from torchtrim.pipelines.window import Shapes, Window
from torchtrim.records.pipeline import Order, Pipeline


class Lone:
    """An executor that accumulates gradients as the ranks of the pipeline would, replica by replica."""

    def __init__(self, window: Window, pipeline: Pipeline) -> None:
        self._window = window
        self._pipeline = pipeline
        self._order = known_order(pipeline)
        self._stages: list[StageModule] = []

    def prepare(self, shapes: Shapes) -> None:
        """Create the stages."""
        self._stages = [
            StageModule(self._window, self._pipeline, number, shapes)
            for number in range(self._window.count)
        ]

    def run(self, step: PipelineStep, numbers: Sequence[PromisedCall]) -> Sequence[Tensor]:
        """Accumulate the step's gradients; return the means of the numbers over all micro-batches."""
        pipeline = self._pipeline
        for stage in self._stages:
            stage.begin(step)
        values: list[list[Tensor]] = []
        sums: list[dict[nn.Parameter, Tensor]] = []
        parameters = [*self._window.root.parameters()]
        before = taken_gradients(pipeline, parameters)
        for replica in range(pipeline.replicas):
            for batch in self._order.backwards():
                values.append(self._one(step, replica, batch, numbers))
            sums.append(taken_gradients(pipeline, parameters))
        if pipeline.replicas > 1:
            for parameter in parameters:
                grads = [one[parameter] for one in (*sums, before) if parameter in one]
                parameter.grad = functools.reduce(torch.add, grads) if grads else None
        return [torch.stack(one).mean() for one in zip(*values, strict=True)]

    def _one(
        self, step: PipelineStep, replica: int, batch: int, numbers: Sequence[PromisedCall]
    ) -> Any:
        pipeline = self._pipeline
        count = pipeline.microbatches * pipeline.replicas
        number = replica * pipeline.microbatches + batch
        tensors = step.given.rows(number, count).tensors()
        passed: Any = None
        for stage in self._stages:
            passed = stage.of_batch(number, passed, tensors)
        loss, values = part_loss(step, passed, number, count, numbers)
        loss.backward()
        return values


def taken_gradients(
    pipeline: Pipeline, parameters: Iterable[nn.Parameter]
) -> dict[nn.Parameter, Tensor]:
    """Detach and return the gradients if there are several replicas: earlier passes count once."""
    if pipeline.replicas == 1:
        return {}
    grads = {p: p.grad for p in parameters if p.grad is not None}
    for parameter in grads:
        parameter.grad = None
    return grads


def known_order(pipeline: Pipeline) -> Order:
    """Return the order of the plan's schedule. Raises `ApplyFailed` if torch has none for its sizes."""
    stages = len(pipeline.cuts) + 1
    order = order_of(pipeline.schedule, pipeline.ranks, stages, pipeline.microbatches)
    if order is None:
        raise ApplyFailed(
            f"torch has no {pipeline.schedule} of {stages} stages on {pipeline.ranks} ranks with "
            f"{pipeline.microbatches} micro-batches. Plan again."
        )
    return order


def in_one_process(root: nn.Module, pipeline: Pipeline) -> Engine:
    """Return an engine that runs all stages in this process."""
    window = Window(root, pipeline.cuts)
    return Engine(root, pipeline, Lone(window, pipeline), window)
