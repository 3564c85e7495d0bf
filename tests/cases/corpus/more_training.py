"""Training loops, as their projects write them. Labelled before anything ran."""

from __future__ import annotations

import io
import math

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    COPY,
    ELEMENTWISE,
    FILL,
    HISTOGRAM,
    ON_DEVICE,
    PAGEABLE,
    QUEUED,
    READ,
    REDUCTION,
    SHAPE,
    TENSOR,
    WHERE,
    aten,
    line,
)
from torch import nn

_ANOMALY = line("torch/csrc/autograd/engine.cpp", 1152, "isnan().any().item() of each output")
_STORAGE = line("torch/_utils.py", 107, "untyped_storage.copy_(self)")
_QUERY = line("c10/cuda/CUDAEvent.h", 102, "asks, and returns")
_EVENT = line("c10/cuda/CUDAEvent.h", 217, "waits for the event")
_STREAM = line("c10/cuda/CUDAEvent.h", 181, "a stream waits, not the host")
_LEGACY = line("torch/csrc/utils/tensor_new.cpp", 800, "a sequence, built on the host and moved")
_ELEMENTS = line("torch/csrc/utils/tensor_new.cpp", 229, "each tensor becomes a number of the host")

_LARGE = 70_000


def _trained() -> nn.Linear:
    """A layer with gradients."""
    layer = nn.Linear(8, 8).cuda()
    layer(torch.rand(4, 8, device="cuda")).square().mean().backward()
    return layer


def _gradients(layer: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in layer.parameters() if one.grad is not None]


@snippet(1, READ)
def loss_that_must_be_finite() -> Body:
    loss = torch.rand(8, device="cuda").mean()

    def body() -> object:
        if not math.isfinite(loss):
            raise ValueError("the loss is not finite")
        return loss

    return body


@snippet(0, ELEMENTWISE, WHERE, repairs=loss_that_must_be_finite)
def loss_made_finite() -> Body:
    loss = torch.rand(8, device="cuda").mean()
    return lambda: torch.where(torch.isfinite(loss), loss, 0.0).nan_to_num()


@snippet(0, ELEMENTWISE, WHERE)
def loss_without_spikes() -> Body:
    loss, average = torch.rand((), device="cuda"), torch.rand((), device="cuda")

    def body() -> object:
        kept = torch.where(loss > 2 * average, torch.zeros_like(loss), loss)
        average.mul_(0.9).add_(kept, alpha=0.1)
        return kept

    return body


@snippet(0, QUEUED, _STREAM)
def batches_fetched_ahead() -> Body:
    batches = [torch.rand(_LARGE).pin_memory() for _ in range(2)]
    stream = torch.cuda.Stream()

    def body() -> object:
        total = torch.zeros((), device="cuda")
        for batch in batches:
            with torch.cuda.stream(stream):
                x = batch.cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            x.record_stream(torch.cuda.current_stream())
            total += x.sum()
        return total

    return body


@snippet(2, PAGEABLE)
def pageable_batches_fetched_ahead() -> Body:
    batches = [torch.rand(_LARGE) for _ in range(2)]
    stream = torch.cuda.Stream()

    def body() -> object:
        total = torch.zeros((), device="cuda")
        for batch in batches:
            with torch.cuda.stream(stream):
                x = batch.cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            total += x.sum()
        return total

    return body


@snippet(0, QUEUED, _QUERY)
def metrics_fetched_when_ready() -> Body:
    loss, host = torch.rand(4, device="cuda"), torch.empty(4, pin_memory=True)

    def body() -> object:
        host.copy_(loss, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return done.query()

    return body


@snippet(1, QUEUED, _EVENT)
def metrics_fetched_and_read() -> Body:
    loss, host = torch.rand(4, device="cuda"), torch.empty(4, pin_memory=True)

    def body() -> object:
        host.copy_(loss, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        return host.tolist()

    return body


@snippet(2, _STORAGE, COPY)
def checkpoint_loaded_onto_the_device() -> Body:
    file = io.BytesIO()
    torch.save(nn.Linear(8, 8).state_dict(), file)

    def body() -> object:
        file.seek(0)
        return torch.load(file, map_location="cuda")

    return body


@snippet(2, READ)
def loss_logged_now_and_then() -> Body:
    losses: list[float] = []
    loss = torch.rand((), device="cuda")

    def body() -> object:
        for step in range(4):
            if step % 2 == 0:
                losses.append(round(loss.item(), 4))
        return losses

    return body


@snippet(4, HISTOGRAM, READ)
def histograms_of_gradients() -> Body:
    layer = _trained()
    return lambda: [torch.histc(one, bins=10) for one in _gradients(layer)]


@snippet(
    0,
    aten("cuda/SummaryOps.cu", 328, "the range is given, so not read"),
    repairs=histograms_of_gradients,
)
def histograms_of_known_range() -> Body:
    layer = _trained()
    return lambda: [torch.histc(one, bins=10, min=-1, max=1) for one in _gradients(layer)]


@snippet(5, _ANOMALY, READ)
def backward_that_looks_for_nan() -> Body:
    layer, x = nn.Linear(8, 8).cuda(), torch.rand(4, 8, device="cuda")

    def body() -> object:
        with torch.autograd.set_detect_anomaly(True):
            layer(x).square().mean().backward()
        return layer

    return body


@snippet(3, READ)
def losses_logged_by_name() -> Body:
    losses = {name: torch.rand((), device="cuda") for name in ("box", "class", "mask")}

    def body() -> object:
        total = torch.stack(list(losses.values())).sum()
        return total, {name: value.item() for name, value in losses.items()}

    return body


@snippet(1, READ)
def best_loss_compared() -> Body:
    best, loss = torch.ones((), device="cuda"), torch.rand((), device="cuda")
    return lambda: loss if loss < best else best


@snippet(0, ELEMENTWISE, repairs=best_loss_compared)
def best_loss_kept() -> Body:
    best, loss = torch.ones((), device="cuda"), torch.rand((), device="cuda")
    return lambda: torch.minimum(loss, best)


@snippet(2, _ELEMENTS, READ)
def tensor_of_losses() -> Body:
    losses = [torch.rand((), device="cuda") for _ in range(2)]
    return lambda: torch.tensor(losses).mean()


@snippet(3, _ELEMENTS, READ, TENSOR)
def tensor_of_losses_on_the_device() -> Body:
    losses = [torch.rand((), device="cuda") for _ in range(2)]
    return lambda: torch.tensor(losses, device="cuda").mean()


@snippet(0, ON_DEVICE, repairs=tensor_of_losses_on_the_device)
def tensor_of_one_loss() -> Body:
    loss = torch.rand((), device="cuda")
    return lambda: (torch.tensor(loss), torch.as_tensor(loss, device="cuda"))


@snippet(2, READ)
def norms_read_in_hooks() -> Body:
    layer, x = nn.Linear(8, 8).cuda(), torch.rand(4, 8, device="cuda")
    norms: list[float] = []
    for one in layer.parameters():
        one.register_hook(lambda gradient: norms.append(gradient.norm().item()))
    return lambda: layer(x).square().mean().backward()


@snippet(0, ELEMENTWISE)
def values_clipped_in_hooks() -> Body:
    layer, x = nn.Linear(8, 8).cuda(), torch.rand(4, 8, device="cuda")
    for one in layer.parameters():
        one.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return lambda: layer(x).square().mean().backward()


@snippet(0, ELEMENTWISE, REDUCTION)
def penalty_of_gradients() -> Body:
    critic, real = nn.Linear(8, 1).cuda(), torch.rand(4, 8, device="cuda")
    fake = torch.rand(4, 8, device="cuda")

    def body() -> object:
        share = torch.rand(4, 1, device=real.device)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        return ((slope.norm(2, dim=1) - 1) ** 2).mean()

    return body


@snippet(1, _LEGACY, COPY)
def legacy_tensor_of_a_list() -> Body:
    return lambda: torch.cuda.FloatTensor([0.9, 0.1])


@snippet(0, FILL, repairs=legacy_tensor_of_a_list)
def legacy_tensor_filled() -> Body:
    return lambda: torch.cuda.FloatTensor(4, 1).fill_(1.0)


@snippet(1, COPY)
def labels_of_the_type_of_others() -> Body:
    said, wanted = torch.rand(4, device="cuda"), torch.ones(4, dtype=torch.long)
    return lambda: said - wanted.type_as(said)


@snippet(0, ELEMENTWISE, REDUCTION)
def losses_weighted_by_uncertainty() -> Body:
    losses, logs = torch.rand(3, device="cuda"), nn.Parameter(torch.zeros(3, device="cuda"))
    return lambda: (torch.exp(-logs) * losses + logs).sum().backward()


@snippet(0, ELEMENTWISE, SHAPE)
def step_in_named_ranges() -> Body:
    layer, x = nn.Linear(8, 8).cuda(), torch.rand(4, 8, device="cuda")

    def body() -> object:
        with torch.cuda.nvtx.range("forward"), torch.profiler.record_function("forward"):
            return layer(x)

    return body
