"""Losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    ELEMENTWISE,
    EXPAND,
    LOSS,
    MASKED_FILL,
    NONZERO,
    REDUCTION,
    SELECTED,
    SOFTMAX,
    UNIQUE,
    WHERE,
    aten,
    line,
)


def _logits() -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(16, 5, device="cuda", requires_grad=True)
    return logits, torch.randint(0, 5, (16,), device="cuda")


@snippet(0, SOFTMAX, LOSS)
def cross_entropy() -> Body:
    logits, target = _logits()
    return lambda: F.cross_entropy(logits, target).backward()


@snippet(0, SOFTMAX, LOSS)
def cross_entropy_that_ignores() -> Body:
    logits, target = _logits()
    target[::3] = -100
    return lambda: F.cross_entropy(logits, target, ignore_index=-100).backward()


@snippet(0, SOFTMAX, LOSS)
def cross_entropy_of_weights() -> Body:
    logits, target = _logits()
    weight = torch.rand(5, device="cuda")
    return lambda: F.cross_entropy(logits, target, weight=weight)


@snippet(0, SOFTMAX, MASKED_FILL)
def cross_entropy_with_smoothing() -> Body:
    logits, target = _logits()
    return lambda: F.cross_entropy(logits, target, label_smoothing=0.1)


@snippet(1, aten("LossNLL.cpp", 612, "target.masked_select of what is not ignored"), SELECTED)
def cross_entropy_of_weights_with_smoothing() -> Body:
    logits, target = _logits()
    weight = torch.rand(5, device="cuda")
    return lambda: F.cross_entropy(logits, target, weight=weight, label_smoothing=0.1)


@snippet(
    0,
    aten("LossNLL.cpp", 621, "a sum needs no number of targets"),
    repairs=cross_entropy_of_weights_with_smoothing,
)
def cross_entropy_summed_with_smoothing() -> Body:
    logits, target = _logits()
    weight = torch.rand(5, device="cuda")
    return lambda: F.cross_entropy(
        logits, target, weight=weight, label_smoothing=0.1, reduction="sum"
    )


@snippet(0, LOSS)
def negative_log_likelihood() -> Body:
    logits, target = _logits()
    return lambda: F.nll_loss(logits.log_softmax(1), target)


@snippet(0, ELEMENTWISE, REDUCTION)
def losses_of_elements() -> Body:
    x = torch.rand(16, device="cuda", requires_grad=True)
    y = torch.rand(16, device="cuda")

    def body() -> object:
        loss = F.mse_loss(x, y) + F.smooth_l1_loss(x, y) + F.l1_loss(x, y)
        loss = loss + F.binary_cross_entropy_with_logits(x, y, pos_weight=y) + F.huber_loss(x, y)
        loss.backward()
        return loss

    return body


@snippet(0, ELEMENTWISE, REDUCTION)
def losses_of_rows() -> Body:
    x, y = torch.rand(8, 4, device="cuda"), torch.rand(8, 4, device="cuda")
    sign = torch.ones(8, device="cuda")

    def body() -> object:
        loss = F.cosine_embedding_loss(x, y, sign) + F.triplet_margin_loss(x, y, y + 1)
        return loss + F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean")

    return body


@snippet(1, line("torch/nn/functional.py", 3296, "if any variance is below 0"))
def gaussian_likelihood() -> Body:
    x, y = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
    variance = torch.rand(8, device="cuda") + 0.1
    return lambda: F.gaussian_nll_loss(x, y, variance)


@snippet(0, ELEMENTWISE, repairs=gaussian_likelihood)
def gaussian_likelihood_by_hand() -> Body:
    x, y = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
    variance = torch.rand(8, device="cuda") + 0.1
    return lambda: 0.5 * (variance.log() + (x - y).square() / variance).mean()


@snippet(
    4,
    aten("LossCTC.cpp", 516, "targets.to(CPU)"),
    aten("cuda/LossCTC.cu", 287, "lengths of targets moved"),
    aten("cuda/LossCTC.cu", 288, "lengths of input moved"),
    aten("cuda/LossCTC.cu", 289, "offsets moved"),
)
def ctc_loss_summed() -> Body:
    scores = torch.randn(12, 2, 5, device="cuda").log_softmax(2)
    targets = torch.randint(1, 5, (2, 4), device="cuda")
    return lambda: F.ctc_loss(scores, targets, (12, 12), (4, 3), reduction="sum")


@snippet(3, EXPAND, NONZERO)
def masked_loss_with_backward() -> Body:
    x = torch.rand(64, device="cuda", requires_grad=True)
    y, valid = torch.rand(64, device="cuda"), torch.rand(64, device="cuda") > 0.2
    return lambda: F.mse_loss(x[valid], y[valid]).backward()


@snippet(0, WHERE, REDUCTION, repairs=masked_loss_with_backward)
def weighted_loss_with_backward() -> Body:
    x = torch.rand(64, device="cuda", requires_grad=True)
    y, valid = torch.rand(64, device="cuda"), torch.rand(64, device="cuda") > 0.2

    def body() -> object:
        error = torch.where(valid, (x - y).square(), 0.0)
        (error.sum() / valid.sum()).backward()
        return x.grad

    return body


@snippet(5, EXPAND, NONZERO, UNIQUE)
def segmentation_loss_of_the_article() -> Body:
    """Ignored pixels get label 0, a guard looks for classes, and two masks select."""
    x = torch.rand(64, device="cuda", requires_grad=True)
    labels = torch.randint(-1, 3, (64,), device="cuda")

    def body() -> object:
        known = labels.clone()
        known[known < 0] = torch.zeros((), dtype=torch.long, device="cuda")
        if known.unique().shape[0] < 2:
            return x.sum()
        mask = known > 0
        loss = F.mse_loss(x[mask], known[mask].float())
        loss.backward()
        return loss

    return body


@snippet(0, WHERE, REDUCTION, repairs=segmentation_loss_of_the_article)
def segmentation_loss_of_fixed_shape() -> Body:
    x = torch.rand(64, device="cuda", requires_grad=True)
    labels = torch.randint(-1, 3, (64,), device="cuda")

    def body() -> object:
        known = labels.clamp(min=0)
        mask = known > 0
        error = torch.where(mask, (x - known).square(), 0.0)
        loss = error.sum() / mask.sum()
        loss.backward()
        return loss

    return body


@snippet(1, line("torch/nn/functional.py", 3296, "if any variance is below 0"))
def gaussian_likelihood_in_full() -> Body:
    x, y = torch.rand(8, 2, device="cuda"), torch.rand(8, 2, device="cuda")
    variance = torch.rand(8, 1, device="cuda") + 0.1
    return lambda: F.gaussian_nll_loss(x, y, variance, full=True)
