"""Optimizers, norms and averages, as their projects use them. Labelled before anything ran."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    COPY,
    ELEMENTWISE,
    FOREACH,
    FOUND_INF,
    NORMALIZATION,
    NUMBER,
    READ,
    REDUCTION,
    WHERE,
    aten,
    line,
)
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import update_bn

_CUMULATIVE = line("torch/nn/modules/batchnorm.py", 192, "float(num_batches_tracked)")
_PLATEAU = line("torch/optim/lr_scheduler.py", 1691, "float(metrics)")
_ADAFACTOR = line("torch/optim/_adafactor.py", 381, "the norm of each parameter is read")
_ADAFACTOR_UPDATE = line("torch/optim/_adafactor.py", 415, "the norm of each update is read")
_ASGD_STEP = line("torch/optim/asgd.py", 416, "_get_value(step), then as_tensor on the device")
_SGD_RATE = line("torch/optim/sgd.py", 472, "alpha=-lr, a tensor as a Scalar")
_LBFGS_LOSS = line("torch/optim/lbfgs.py", 358, "float(loss)")
_LBFGS_DONE = line("torch/optim/lbfgs.py", 366, "if opt_cond; the length and gtd as well")
_HOST_STEP = line("torch/optim/nadam.py", 335, "the step is on the host")
_MUON = line("torch/optim/_muon.py", 59, "products and a norm that stays there")
_STATE = line("torch/optim/optimizer.py", 806, "value.to(device), all but the step")
_QR = aten("cuda/linalg/BatchLinearAlgebra.cpp", 1054, "only launches; nothing is checked")


def _trained() -> nn.Linear:
    """A layer with gradients."""
    layer = nn.Linear(8, 8).cuda()
    layer(torch.rand(4, 8, device="cuda")).square().mean().backward()
    return layer


def _gradients(layer: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in layer.parameters() if one.grad is not None]


def _optimizer(make: Callable[..., torch.optim.Optimizer], **options: object) -> Body:
    """A later step of it, whose state is there."""
    optimizer = make(_trained().parameters(), **options)
    optimizer.step()
    return lambda: optimizer.step()


@snippet(1, _PLATEAU, READ)
def rate_lowered_on_a_plateau() -> Body:
    optimizer = torch.optim.SGD(_trained().parameters(), lr=0.1)
    schedule, loss = ReduceLROnPlateau(optimizer), torch.rand((), device="cuda")
    return lambda: schedule.step(loss)


@snippet(4, _ADAFACTOR, _ADAFACTOR_UPDATE, READ)
def adafactor() -> Body:
    return _optimizer(torch.optim.Adafactor)


@snippet(4, _ASGD_STEP, READ, COPY)
def averaged_gradient_descent() -> Body:
    return _optimizer(torch.optim.ASGD)


@snippet(0, _HOST_STEP, FOREACH)
def nadam() -> Body:
    return _optimizer(torch.optim.NAdam)


@snippet(0, _HOST_STEP, FOREACH)
def radam_and_adamax() -> Body:
    first, second = _optimizer(torch.optim.RAdam), _optimizer(torch.optim.Adamax)
    return lambda: (first(), second())


@snippet(0, _MUON, ELEMENTWISE)
def muon() -> Body:
    layer = nn.Linear(8, 8, bias=False).cuda()
    layer(torch.rand(4, 8, device="cuda")).square().mean().backward()
    optimizer = torch.optim.Muon(layer.parameters())
    return lambda: optimizer.step()


@snippet(4, _LBFGS_LOSS, _LBFGS_DONE, READ, exact=False)
def quasi_newton_step() -> Body:
    layer, x = nn.Linear(8, 1).cuda(), torch.rand(4, 8, device="cuda") + 3
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)  # type: ignore[arg-type]


@snippet(1, _SGD_RATE, NUMBER)
def rate_that_is_a_tensor() -> Body:
    rate = torch.tensor(0.1, device="cuda")
    optimizer = torch.optim.SGD(_trained().parameters(), lr=rate, foreach=True)
    return lambda: optimizer.step()


@snippet(1, READ)
def rate_warmed_up_by_a_tensor() -> Body:
    optimizer = torch.optim.SGD(_trained().parameters(), lr=0.1)
    step = torch.tensor(3.0, device="cuda")

    def body() -> object:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, step / 10)
        return optimizer

    return body


@snippet(1, _CUMULATIVE, READ)
def batch_norm_of_all_batches() -> Body:
    norm, x = nn.BatchNorm1d(8, momentum=None).cuda(), torch.rand(4, 8, device="cuda")
    return lambda: norm(x)


@snippet(2, _CUMULATIVE, READ)
def batch_norm_recomputed() -> Body:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
    batches = [torch.rand(4, 8, device="cuda") for _ in range(2)]
    return lambda: update_bn(batches, model)


@snippet(0, NORMALIZATION, ELEMENTWISE)
def batch_norm_frozen() -> Body:
    norm, x = nn.BatchNorm1d(8, momentum=None).cuda().eval(), torch.rand(4, 8, device="cuda")
    return lambda: norm(x)


@snippet(4, READ)
def ratio_of_trust_asked_for() -> Body:
    layer = _trained()

    def body() -> object:
        ratios = []
        for one in layer.parameters():
            assert one.grad is not None
            weight, gradient = one.detach().norm(), one.grad.norm()
            if weight > 0 and gradient > 0:
                ratios.append(weight / gradient)
        return ratios

    return body


@snippet(0, WHERE, REDUCTION, repairs=ratio_of_trust_asked_for)
def ratio_of_trust_chosen() -> Body:
    layer = _trained()

    def body() -> object:
        ratios = []
        for one in layer.parameters():
            assert one.grad is not None
            weight, gradient = one.detach().norm(), one.grad.norm()
            fine = (weight > 0) & (gradient > 0)
            ratios.append(torch.where(fine, weight / gradient, 1.0))
        return ratios

    return body


@snippet(0, REDUCTION, ELEMENTWISE)
def ascent_to_the_sharpest() -> Body:
    layer = _trained()

    def body() -> object:
        norm = torch.stack([one.norm(p=2) for one in _gradients(layer)]).norm(p=2)
        scale = 0.05 / (norm + 1e-12)
        with torch.no_grad():
            for one in layer.parameters():
                assert one.grad is not None
                one.add_(one.grad * scale.to(one))
        return layer

    return body


@snippet(2, COPY)
def average_kept_on_the_host() -> Body:
    layer = _trained()
    kept = [one.detach().cpu() for one in layer.parameters()]

    def body() -> object:
        for old, new in zip(kept, layer.parameters(), strict=True):
            old.mul_(0.9).add_(0.1 * new.detach().cpu())
        return kept

    return body


@snippet(0, FOREACH, repairs=average_kept_on_the_host)
def average_of_all_at_once() -> Body:
    layer, average = _trained(), _trained()

    def body() -> object:
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(layer.parameters()), 0.1)
        return average

    return body


@snippet(1, READ)
def average_with_a_counted_decay() -> Body:
    layer, average = _trained(), _trained()
    steps = torch.zeros((), device="cuda")

    def body() -> object:
        decay = min(0.999, (1 + steps) / (10 + steps))
        with torch.no_grad():
            for old, new in zip(average.parameters(), layer.parameters(), strict=True):
                old.lerp_(new, 1 - decay)
        return average

    return body


@snippet(1, READ)
def norm_clipped_at_a_percentile() -> Body:
    layer, history = _trained(), [1.0, 2.0]

    def body() -> object:
        total = torch.stack([one.norm() for one in _gradients(layer)]).norm()
        history.append(total.item())
        return nn.utils.clip_grad_norm_(layer.parameters(), float(np.percentile(history, 10)))

    return body


@snippet(0, aten("Sorting.cpp", 261, "only the CPU checks q"), repairs=norm_clipped_at_a_percentile)
def norm_clipped_at_a_quantile() -> Body:
    layer, history = _trained(), torch.rand(8, device="cuda")

    def body() -> object:
        total = torch.stack([one.norm() for one in _gradients(layer)]).norm()
        scale = (torch.quantile(history, 0.1) / (total + 1e-6)).clamp(max=1.0)
        return torch._foreach_mul_(_gradients(layer), scale)

    return body


@snippet(1, FOUND_INF, READ)
def scaled_and_accumulated() -> Body:
    layer, x = nn.Linear(8, 8).cuda(), torch.rand(4, 8, device="cuda")
    scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.SGD(layer.parameters(), lr=0.1)

    def body() -> object:
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = layer(x).float().square().mean() / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return layer

    return body


@snippet(3, FOUND_INF, READ, line("torch/amp/grad_scaler.py", 574, "scale.item()"))
def schedule_that_asks_for_a_skipped_step() -> Body:
    layer = nn.Linear(8, 8).cuda()
    scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.rand(4, 8, device="cuda")).sum()).backward()

    def body() -> object:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() >= before

    return body


@snippet(4, _STATE, COPY)
def optimizer_loaded_from_the_host() -> Body:
    there, here = _trained(), nn.Linear(8, 8)
    here(torch.rand(4, 8)).sum().backward()
    saved, optimizer = torch.optim.Adam(here.parameters()), torch.optim.Adam(there.parameters())
    saved.step()
    state = saved.state_dict()
    return lambda: optimizer.load_state_dict(state)


@snippet(0, ELEMENTWISE, REDUCTION)
def spectral_norm() -> Body:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)).cuda()
    x = torch.rand(4, 8, device="cuda")
    return lambda: layer(x)


@snippet(0, _QR)
def orthogonal_weights() -> Body:
    layer = nn.Linear(8, 8).cuda()
    return lambda: nn.init.orthogonal_(layer.weight)
