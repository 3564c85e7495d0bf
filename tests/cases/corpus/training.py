"""Optimizers, scaling, clipping, averaging."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    CLIP,
    COPY,
    ELEMENTWISE,
    FOREACH,
    FOUND_INF,
    FUSED,
    ON_DEVICE,
    READ,
    REDUCTION,
    aten,
    line,
    thread,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel

_STEP = line("torch/optim/adam.py", 772, "_get_value(step) for each parameter")
_STEP_AGAIN = line("torch/optim/adam.py", 775, "_get_value(step) once more")
_ONE_STEP = line("torch/optim/adam.py", 528, "_get_value(step)")


def _trained() -> nn.Linear:
    """A layer with gradients."""
    layer = nn.Linear(8, 8).cuda()
    layer(torch.rand(4, 8, device="cuda")).square().mean().backward()
    return layer


def _steps_on_device(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As after a checkpoint that was loaded onto the device."""
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = state["step"].cuda()
    return optimizer


@snippet(0, FOREACH)
def sgd() -> Body:
    optimizer = torch.optim.SGD(_trained().parameters(), lr=0.1, momentum=0.9)
    return lambda: optimizer.step()


@snippet(0, FOREACH)
def adam() -> Body:
    optimizer = torch.optim.Adam(_trained().parameters())
    return lambda: optimizer.step()


@snippet(0, FOREACH)
def adamw_of_three_steps() -> Body:
    layer = _trained()
    optimizer = torch.optim.AdamW(layer.parameters())
    x = torch.rand(4, 8, device="cuda")

    def body() -> object:
        for _ in range(3):
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
        return layer.weight

    return body


@snippet(4, _STEP, _STEP_AGAIN, READ)
def adam_with_steps_on_the_device() -> Body:
    optimizer = _steps_on_device(torch.optim.Adam(_trained().parameters()))
    return lambda: optimizer.step()


@snippet(2, _ONE_STEP, READ)
def single_adam_with_steps_on_the_device() -> Body:
    layer = _trained()
    optimizer = _steps_on_device(torch.optim.Adam(layer.parameters(), foreach=False))
    return lambda: optimizer.step()


@snippet(
    0,
    line("torch/optim/adam.py", 686, "the steps are added to on the device"),
    FOREACH,
    repairs=adam_with_steps_on_the_device,
)
def capturable_adam() -> Body:
    optimizer = torch.optim.Adam(_trained().parameters(), capturable=True)
    optimizer.step()
    return lambda: optimizer.step()


@snippet(0, FUSED, repairs=adam_with_steps_on_the_device)
def fused_adam() -> Body:
    optimizer = torch.optim.Adam(_trained().parameters(), fused=True)
    optimizer.step()
    return lambda: optimizer.step()


@snippet(0, FOREACH)
def rmsprop_and_adagrad() -> Body:
    rmsprop = torch.optim.RMSprop(_trained().parameters())
    adagrad = torch.optim.Adagrad(_trained().parameters())
    return lambda: (rmsprop.step(), adagrad.step())


@snippet(0, FOREACH, CLIP)
def clipped_norm() -> Body:
    layer = _trained()
    return lambda: nn.utils.clip_grad_norm_(layer.parameters(), 1.0)


@snippet(1, line("torch/nn/utils/clip_grad.py", 109, "if the norm is not finite"), READ)
def clipped_norm_that_must_be_finite() -> Body:
    layer = _trained()
    return lambda: nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)


@snippet(1, READ)
def clipped_norm_that_is_logged() -> Body:
    layer = _trained()
    return lambda: nn.utils.clip_grad_norm_(layer.parameters(), 1.0).item()


@snippet(0, FOREACH)
def clipped_values() -> Body:
    layer = _trained()
    return lambda: nn.utils.clip_grad_value_(layer.parameters(), 1.0)


def _scaled(
    make: Callable[..., torch.optim.Optimizer], **options: bool
) -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
    """A scaler and an optimizer whose gradients are scaled."""
    layer = nn.Linear(8, 8).cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
    loss = layer(torch.rand(4, 8, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    return scaler, make(layer.parameters(), lr=0.1, **options)


@snippet(1, FOUND_INF, READ, thread("pytorch/pytorch", 80167, "found_inf read in each step"))
def scaler_step() -> Body:
    scaler, optimizer = _scaled(torch.optim.SGD)

    def body() -> object:
        scaler.step(optimizer)
        scaler.update()
        return scaler

    return body


@snippet(
    0,
    line("torch/amp/grad_scaler.py", 418, "found_inf is handed to the kernel"),
    FUSED,
    repairs=scaler_step,
)
def scaler_step_of_fused_adam() -> Body:
    scaler, optimizer = _scaled(torch.optim.AdamW, fused=True)

    def body() -> object:
        scaler.step(optimizer)
        scaler.update()
        return scaler

    return body


@snippet(1, FOUND_INF, READ)
def scaler_unscaled_and_clipped() -> Body:
    scaler, optimizer = _scaled(torch.optim.SGD)

    def body() -> object:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        scaler.step(optimizer)
        return scaler

    return body


@snippet(
    1,
    line("torch/amp/grad_scaler.py", 574, "scale.item()"),
    READ,
    thread("huggingface/accelerate", 1714, "the scale read in each step"),
)
def scale_of_the_scaler() -> Body:
    scaler, _ = _scaled(torch.optim.SGD)
    return lambda: scaler.get_scale()


@snippet(0, aten("cuda/AmpKernels.cu", 209, "the scale is changed by a kernel"))
def scaler_update() -> Body:
    scaler, optimizer = _scaled(torch.optim.SGD)
    scaler.step(optimizer)
    return lambda: scaler.update()


@snippet(4, READ, thread("hao-ai-lab/FastVideo", 1217, "the loss read in each micro-step"))
def loss_read_in_each_micro_step() -> Body:
    losses = [torch.rand((), device="cuda") for _ in range(4)]
    return lambda: sum(loss.item() for loss in losses)


@snippet(1, READ, repairs=loss_read_in_each_micro_step)
def loss_read_once() -> Body:
    losses = [torch.rand((), device="cuda") for _ in range(4)]

    def body() -> object:
        total = torch.zeros((), device="cuda")
        for loss in losses:
            total += loss
        return total.item()

    return body


@snippet(2, READ, thread("NVIDIA/Megatron-LM", 7076, "a check in each gradient's hook"))
def check_of_each_gradient() -> Body:
    layer = _trained()

    def body() -> object:
        for parameter in layer.parameters():
            assert parameter.grad is not None
            if parameter.grad.isnan().any():
                raise ValueError("a gradient is not a number")
        return layer

    return body


@snippet(1, READ, repairs=check_of_each_gradient)
def check_of_all_gradients() -> Body:
    layer = _trained()

    def body() -> object:
        found = torch.zeros((), dtype=torch.bool, device="cuda")
        for parameter in layer.parameters():
            assert parameter.grad is not None
            found |= parameter.grad.isnan().any()
        return bool(found)

    return body


@snippet(0, FOREACH)
def average_by_lerp() -> Body:
    layer, average = _trained(), _trained()

    def body() -> object:
        with torch.no_grad():
            for kept, new in zip(average.parameters(), layer.parameters(), strict=True):
                kept.lerp_(new, 0.1)
        return average

    return body


@snippet(
    2, line("torch/optim/swa_utils.py", 310, "bool(n_averaged == 0), then n_averaged > 0"), READ
)
def averaged_model_of_the_device() -> Body:
    layer = _trained()
    average = AveragedModel(layer, device=torch.device("cuda"))
    return lambda: average.update_parameters(layer)


@snippet(
    2,
    line("torch/optim/swa_utils.py", 339, "n_averaged.to(device)"),
    line("torch/optim/swa_utils.py", 98, "a tensor as a Scalar weight"),
    COPY,
)
def averaged_model_with_a_host_counter() -> Body:
    layer = _trained()
    average = AveragedModel(layer)
    average.update_parameters(layer)
    return lambda: average.update_parameters(layer)


@snippet(0, ON_DEVICE)
def schedule_and_zeroed_gradients() -> Body:
    optimizer = torch.optim.SGD(_trained().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def body() -> object:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        return schedule.get_last_lr()

    return body


@snippet(0, ELEMENTWISE, REDUCTION)
def penalty_of_parameters() -> Body:
    layer = _trained()
    return lambda: sum(parameter.square().sum() for parameter in layer.parameters())


@snippet(0, ELEMENTWISE)
def autocast_forward() -> Body:
    layer, x = _trained(), torch.rand(4, 8, device="cuda")

    def body() -> object:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = layer(x).float().square().mean()
        loss.backward()
        return loss

    return body
