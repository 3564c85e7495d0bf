"""Runs a pipeline in several processes on the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from torchtrim.errors import ApplyFailed, Unsupported
from torchtrim.pipelines.engine import (
    Engine,
    PipelineStep,
    StageModule,
    StepInputs,
    checksum,
    part_loss,
)
from torchtrim.pipelines.lone import known_order, taken_gradients
from torchtrim.pipelines.orders import CLASSES, SINGLE
from torchtrim.pipelines.promise import PromisedCall
from torchtrim.pipelines.window import Shapes, TensorMeta, Window
from torchtrim.records.pipeline import Pipeline

Trace = Callable[[Sequence[Tensor]], contextlib.AbstractContextManager[None]]


class Several:
    """An executor of this rank's stages. Each `pipeline.ranks` consecutive ranks form one replica.

    `around(tensors)` returns a context manager for the schedule's step, for measurements.
    """

    def __init__(self, window: Window, pipeline: Pipeline) -> None:
        self._window = window
        self._pipeline = pipeline
        self._order = known_order(pipeline)
        self._device = torch.device("cpu")
        self._modules: dict[int, StageModule] = {}
        self._schedules: dict[Any, Any] = {}
        self._owner: dict[str, int] = {}
        self.around: Trace = lambda _: contextlib.nullcontext()
        rank, ranks = dist.get_rank(), pipeline.ranks
        self.replica, self.place = divmod(rank, ranks)
        self._across, self.group = _groups(pipeline)

    def prepare(self, shapes: Shapes) -> None:
        """Create this rank's stages, and free the parameters of other ranks."""
        window = self._window
        self._check_alike()
        for stage, home in enumerate(self._order.homes):
            if home == self.place:
                self._modules[stage] = StageModule(window, self._pipeline, stage, shapes)
            for module in window.own(stage, shapes):
                self._owner.update((name, home) for name in self._names(module))
        self._device = next((p.device for p in window.root.parameters()), self._device)
        self._free()
        gathered = functools.partial(self._gathered)
        window.root.register_state_dict_post_hook(gathered)  # type: ignore[no-untyped-call]

    def run(self, step: PipelineStep, numbers: Sequence[PromisedCall]) -> Sequence[Tensor]:
        """Accumulate the step's gradients; return the means of the numbers over all micro-batches."""
        pipeline = self._pipeline
        count = pipeline.microbatches * pipeline.replicas
        begins = self.replica * pipeline.microbatches
        for module in self._modules.values():
            module.begin(step, begins)
        kept: dict[int, list[Tensor]] = {}

        def loss_of(outputs: Any, batch: Tensor) -> Tensor:
            number = int(batch)
            loss: Tensor
            loss, kept[number] = part_loss(step, outputs, number, count, numbers)
            return loss

        before = taken_gradients(pipeline, self._parameters())
        self._one_step(step, loss_of, begins)
        self._add_replicas(before)
        return self._means(kept, len(numbers), checksum(step))

    def kept(self) -> list[Tensor]:
        """Return what stays alive between steps: parameters, buffers, gradients and receive buffers."""
        root = self._window.root
        grads = [p.grad for p in root.parameters() if p.grad is not None]
        received = [
            info.buffer
            for schedule in self._schedules.values()
            for stage in getattr(schedule, "_stages", None) or [schedule._stage]
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
            if info.buffer is not None
        ]
        return [*root.parameters(), *root.buffers(), *grads, *received]

    def _one_step(self, step: PipelineStep, loss_of: Any, begins: int) -> None:
        given = step.given.rows(self.replica, self._pipeline.replicas)
        tensors = given.tensors()
        schedule = self._schedule(given, step.shapes)
        schedule._loss_fn = loss_of
        last = len(self._order.homes) - 1 in self._modules
        batches = torch.arange(begins, begins + self._pipeline.microbatches, device="cpu")
        args = tuple(tensors.values())[:1] if 0 in self._modules else ()
        with self.around(tuple(tensors.values())):
            schedule.step(
                *args,
                target=batches if last else None,
                losses=[] if last else None,
                return_outputs=False,
                **tensors,
            )

    def _schedule(self, given: StepInputs, shapes: Shapes) -> Any:
        key = given.key()
        if key not in self._schedules:
            stages = [self._stage(number, given, shapes) for number in self._modules]
            self._schedules[key] = CLASSES[self._pipeline.schedule](
                stages[0] if self._pipeline.schedule in SINGLE else stages,
                self._pipeline.microbatches,
                loss_fn=_unset,
                scale_grads=False,
            )
        return self._schedules[key]

    def _stage(self, number: int, given: StepInputs, shapes: Shapes) -> PipelineStage:
        first = next(iter(given.rows(0, self._pipeline.microbatches).tensors().values()))
        begins = [TensorMeta.of(first), *shapes.received]
        ends = [*shapes.received, TensorMeta((), torch.float32, self._device)]
        return PipelineStage(
            self._modules[number],
            number,
            len(self._order.homes),
            self._device,
            input_args=_blank(begins[number], graded=number > 0),
            output_args=_blank(ends[number], graded=True),
            group=self.group,
        )

    def _means(self, kept: dict[int, list[Tensor]], count: int, given: float) -> Sequence[Tensor]:
        """Return the means of the numbers over all micro-batches. All ranks need one checksum, `given`."""
        sums = torch.zeros(count, dtype=torch.float64, device="cpu")
        total = self._pipeline.microbatches * self._pipeline.replicas
        if kept and count:
            rows = torch.stack([torch.stack([v.double() for v in one]) for one in kept.values()])
            sums = rows.sum(0).cpu()
        checks = torch.tensor([given, given * given], dtype=torch.float64, device="cpu")
        sums = torch.cat([sums, checks])
        dist.all_reduce(sums)
        once, squared = sums[-2:].tolist()
        if once**2 != dist.get_world_size() * squared:
            raise Unsupported(
                "the ranks got different batches. Every rank of a pipeline must read the same "
                "ones: leave "
                "DistributedSampler and the rank out of the loader, and seed its shuffling."
            )
        default = [torch.get_default_dtype()] * count
        dtypes = [value.dtype for value in next(iter(kept.values()), [])] or default
        return [(value / total).to(dtypes[n]) for n, value in enumerate(sums[:-2])]

    def _add_replicas(self, before: dict[nn.Parameter, Tensor]) -> None:
        if self._pipeline.replicas == 1:
            return
        for parameter in self._parameters():
            grad = parameter.grad
            if grad is not None:
                dist.all_reduce(grad, group=self._across)
                if parameter in before:
                    grad.add_(before[parameter])
            elif parameter in before:
                parameter.grad = before[parameter]

    def _parameters(self) -> list[nn.Parameter]:
        return [*nn.ModuleList(self._modules.values()).parameters()]

    def _names(self, module: nn.Module) -> list[str]:
        inside = {id(one) for one in (*module.parameters(), *module.buffers())}
        root = self._window.root
        tensors = (*root.named_parameters(), *root.named_buffers())
        return [name for name, one in tensors if id(one) in inside]

    def _free(self) -> None:
        for name, parameter in self._window.root.named_parameters():
            if self._owner.get(name, self.place) != self.place:
                parameter.grad = None
                blank = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                parameter.data = blank.expand(parameter.shape)

    def _gathered(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Complete a `state_dict` on every rank by broadcasts. All ranks have to call it."""
        for name, home in self._owner.items():
            key = prefix + name
            if key in state:
                whole = state[key].detach().clone().contiguous()
                source = self.replica * self._pipeline.ranks + home
                dist.broadcast(whole, source, group=self.group)
                state[key] = whole

    def _check_alike(self) -> None:
        """Raise `ApplyFailed` on all ranks if their models differ."""
        total = torch.zeros(1, dtype=torch.float64, device="cpu")
        for parameter in self._window.root.parameters():
            total += parameter.detach().double().sum().cpu()
        sums = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
        dist.all_gather(sums, total)
        if any(not torch.equal(one, sums[0]) for one in sums):
            raise ApplyFailed(
                "the ranks have models with different parameters. Every rank runs the whole script, so all "
                "have to use the same random seed: leave the rank out of the seed."
            )


def _unset(*_: Any) -> Tensor:
    raise AssertionError("set before each step")


def _blank(meta: TensorMeta, *, graded: bool) -> Tensor:
    blank = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
    return blank.requires_grad_(graded and meta.dtype.is_floating_point)


def _groups(pipeline: Pipeline) -> tuple[Any, Any]:
    world = dist.get_world_size()
    if world != pipeline.processes:
        raise Unsupported(
            f"the plan is for {pipeline.processes} processes ({pipeline.ranks} ranks x {pipeline.replicas} "
            f"replicas), and {world} run. Start it with torchrun --nproc-per-node {pipeline.processes}."
        )
    if pipeline.replicas == 1:
        return None, None
    rank = dist.get_rank()
    every, ranks = range(world), pipeline.ranks
    across = [dist.new_group([*every[place::ranks]]) for place in range(ranks)]
    within = [dist.new_group([*every[first : first + ranks]]) for first in every[::ranks]]
    return across[rank % ranks], within[rank // ranks]


def in_several_processes(root: nn.Module, pipeline: Pipeline) -> tuple[Engine, Several]:
    """Return an engine for the model in stages, and the executor of this rank's. Needs a process group."""
    window = Window(root, pipeline.cuts)
    executor = Several(window, pipeline)
    return Engine(root, pipeline, executor, window), executor


@contextlib.contextmanager
def clipping_together(executor: Several | None = None) -> Iterator[None]:
    """Make `torch.nn.utils.clip_grad_norm_` use the parameters of all ranks of a pipeline in the block.

    Without an executor, this process has all of them.
    """
    original = torch.nn.utils.clip_grad_norm_

    @functools.wraps(original)
    def clip(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *_: Any, **__: Any
    ) -> Tensor:
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = _norm(several, float(norm_type), executor)
        own = [one for one in several if one.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm, foreach=False)
        return norm

    torch.nn.utils.clip_grad_norm_ = clip
    try:
        yield
    finally:
        torch.nn.utils.clip_grad_norm_ = original


def _norm(parameters: Sequence[Tensor], kind: float, executor: Several | None) -> Tensor:
    """Return the norm of all ranks' gradients. The sum is exact, so its order does not matter."""
    powers = torch.zeros(len(parameters), dtype=torch.float64, device="cpu")
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.grad.numel():
            sizes = parameter.grad.detach().double().abs()
            powers[number] = sizes.max() if math.isinf(kind) else sizes.pow(kind).sum()
    if executor is not None:
        dist.all_reduce(powers, group=executor.group)
    values = powers.tolist()
    norm = max(values, default=0.0) if math.isinf(kind) else math.fsum(values) ** (1 / kind)
    return torch.tensor(norm, dtype=torch.get_default_dtype(), device="cpu")
