"""The custom operators `torchtrim::linear_cross_entropy` and `chunked_cross_entropy`.

The first computes the gradients of hidden states, weight and bias together with the loss, and backward scales
them. If each row has its own gradient, or float16 would underflow, backward recomputes the logits instead.
The second reads existing logits and writes their gradient in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtrim.executor.autograd import only_once
from torchtrim.techniques.chunked_loss.chunks import (
    ExistingLogits,
    LossRule,
    Product,
    Targets,
    gradients,
    losses,
    reduced,
    sums_type,
)
from torchtrim.techniques.chunked_loss.found import rows_for

_RULE = "str reduction, int ignore_index, float label_smoothing, float z_loss, int rows"
_LINEAR = (
    f"Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, {_RULE}"
)
_GIVEN = f"Tensor logits, Tensor target, Tensor? class_weight, {_RULE}"
_Library: Any = torch.library.Library
_library = _Library("torchtrim", "FRAGMENT")
_library.define(f"linear_cross_entropy({_LINEAR}) -> Tensor")
_library.define(
    f"linear_cross_entropy_forward({_LINEAR}, bool[3] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"linear_cross_entropy_backward(Tensor grad, Tensor lse, {_LINEAR}, bool[3] wanted) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.define(f"chunked_cross_entropy({_GIVEN}) -> Tensor")
_library.define(f"chunked_cross_entropy_forward({_GIVEN}) -> (Tensor, Tensor)")
_library.define(f"chunked_cross_entropy_backward(Tensor grad, Tensor lse, {_GIVEN}) -> Tensor")
_ops: Any = torch.ops.torchtrim
_AUTOCAST = ("AutocastCPU", "AutocastCUDA")


class _Linear(torch.autograd.Function):
    """Linear and cross entropy, with the gradients computed in forward where possible."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        hidden, weight, bias, target, class_weight, *rule = call
        wanted = list(ctx.needs_input_grad[:3])
        ctx.early = is_early(rule[0], hidden.dtype)
        ctx.rule, ctx.wanted = rule, wanted
        now = wanted if ctx.early else [False] * 3
        loss, lse, *made = _ops.linear_cross_entropy_forward(*call, now)
        if ctx.early:
            ctx.save_for_backward(*made)
        else:
            ctx.save_for_backward(lse, hidden, weight, bias, target, class_weight)
        kept: Tensor = loss
        return kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        only_once("torchtrim's linear_cross_entropy")
        if ctx.early:
            found = [_scaled(one, grad) for one in ctx.saved_tensors]
        else:
            lse, *tensors = ctx.saved_tensors
            found = _ops.linear_cross_entropy_backward(grad, lse, *tensors, *ctx.rule, ctx.wanted)
        mine = [one if want else None for one, want in zip(found, ctx.wanted, strict=True)]
        return (*mine, *(None for _ in range(2 + len(ctx.rule))))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        loss, lse = _ops.chunked_cross_entropy_forward(*call)
        ctx.save_for_backward(lse, *call[:3])
        ctx.rule = call[3:]
        kept: Tensor = loss
        return kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        only_once("torchtrim's chunked_cross_entropy")
        lse, *tensors = ctx.saved_tensors
        found = _ops.chunked_cross_entropy_backward(grad, lse, *tensors, *ctx.rule)
        return (found, *(None for _ in range(2 + len(ctx.rule))))


def is_early(reduction: str, dtype: torch.dtype) -> bool:
    """Return True if forward can compute gradients: all rows share one factor, applied later."""
    return reduction != "none" and dtype is not torch.float16


def _scaled(made: Tensor, grad: Tensor) -> Tensor:
    if not made.numel() or (grad.device.type == "cpu" and type(grad) is Tensor and grad == 1):
        return made
    return made * grad.to(made.dtype)


def _linear(*call: Any) -> Tensor:
    if not any(x is not None and x.requires_grad for x in call[:3]) or not torch.is_grad_enabled():
        with torch._C._AutoDispatchBelowAutograd():
            plain: Tensor = _ops.linear_cross_entropy_forward(*call, [False] * 3)[0]
        return plain
    made: Tensor = _Linear.apply(*call)  # type: ignore[no-untyped-call]
    return made


def _chunked(*call: Any) -> Tensor:
    made: Tensor = _Chunked.apply(*call)  # type: ignore[no-untyped-call]
    return made


def _linear_forward(*call: Any) -> tuple[Tensor, ...]:
    source, targets, rule = _linear_parts(*call)
    any_wanted = any(call[-1])
    loss, lse = losses(source, targets, rule, targets.scale() if any_wanted else None)
    kept = lse.new_empty(0) if any_wanted else lse
    return reduced(loss, targets, rule), kept, *source.gradients()


def _linear_backward(grad: Tensor, lse: Tensor, *call: Any) -> tuple[Tensor, ...]:
    source, targets, rule = _linear_parts(*call)
    gradients(source, targets, rule, lse, targets.scale(grad))
    return source.gradients()


def _linear_parts(
    hidden: Tensor, weight: Tensor, bias: Any, target: Tensor, class_weight: Any, *rest: Any
) -> tuple[Product, Targets, LossRule]:
    rule = LossRule(*rest[:-1])
    targets = Targets(target, class_weight, rule, sums_type(hidden.dtype))
    return Product(hidden, weight, bias, tuple(rest[-1]), rule.rows), targets, rule


def _chunked_forward(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    rule = LossRule(*rest)
    targets = Targets(target, class_weight, rule, sums_type(logits.dtype))
    loss, lse = losses(ExistingLogits(logits), targets, rule, None)
    return reduced(loss, targets, rule), lse


def _chunked_backward(
    grad: Tensor, lse: Tensor, logits: Tensor, target: Tensor, class_weight: Any, *rest: Any
) -> Tensor:
    rule = LossRule(*rest)
    targets = Targets(target, class_weight, rule, sums_type(logits.dtype))
    into = torch.empty_like(logits)
    gradients(ExistingLogits(logits, into), targets, rule, lse, targets.scale(grad))
    return into


def _under_autocast(*call: Any) -> Tensor:
    """Cast hidden, weight and bias like a linear layer under autocast; compute the loss in float32."""
    device = call[0].device.type
    dtype = torch.get_autocast_dtype(device)
    cast = (x if x is None or x.dtype is torch.float64 else x.to(dtype) for x in call[:3])
    with torch.autocast(device, enabled=False):
        made: Tensor = _ops.linear_cross_entropy(*cast, *call[3:])
    return made


def _chunked_under_autocast(logits: Tensor, *rest: Any) -> Tensor:
    with torch.autocast(logits.device.type, enabled=False):
        made: Tensor = _ops.chunked_cross_entropy(logits, *rest)
    return made


def _loss_like(like: Tensor, target: Tensor, reduction: str) -> Tensor:
    return _sums_like(like, target.shape if reduction == "none" else ())


def _sums_like(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_empty(shape, dtype=sums_type(like.dtype))


def _gradients_like(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(one) if want and one is not None else hidden.new_empty(0)
        for one, want in zip((hidden, weight, bias), wanted, strict=True)
    )


_SHAPES: dict[str, Callable[..., Any]] = {
    "linear_cross_entropy": lambda x, w, b, target, cw, *rule: _loss_like(x, target, rule[0]),
    "linear_cross_entropy_forward": lambda x, w, b, target, cw, *rule: (
        _loss_like(x, target, rule[0]),
        _sums_like(x, (0,) if any(rule[-1]) else target.shape),
        *_gradients_like(x, w, b, rule[-1]),
    ),
    "linear_cross_entropy_backward": lambda grad, lse, x, w, b, *rest: _gradients_like(
        x, w, b, rest[-1]
    ),
    "chunked_cross_entropy": lambda x, target, cw, *rule: _loss_like(x, target, rule[0]),
    "chunked_cross_entropy_forward": lambda x, target, cw, *rule: (
        _loss_like(x, target, rule[0]),
        _sums_like(x, target.shape),
    ),
    "chunked_cross_entropy_backward": lambda grad, lse, x, *rest: torch.empty_like(x),
}
_KERNELS = {
    "linear_cross_entropy_forward": _linear_forward,
    "linear_cross_entropy_backward": _linear_backward,
    "chunked_cross_entropy_forward": _chunked_forward,
    "chunked_cross_entropy_backward": _chunked_backward,
}
_fake: Any = torch.library.register_fake
for _name, _shape in _SHAPES.items():
    _fake(f"torchtrim::{_name}")(_shape)
for _name, _kernel in _KERNELS.items():
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
for _name, _graded, _cast in (
    ("linear_cross_entropy", _linear, _under_autocast),
    ("chunked_cross_entropy", _chunked, _chunked_under_autocast),
):
    _library.impl(_name, _graded, "CompositeImplicitAutograd")
    for _key in _AUTOCAST:
        _library.impl(_name, _cast, _key)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    rows: int = 0,
) -> Tensor:
    """Return `cross_entropy(hidden @ weight.T + bias, target)` without materializing the logits.

    `hidden` is (rows, width). `rows`: rows per chunk, or 0 to choose. The loss is in the accumulation dtype.
    """
    rows = rows or rows_for(len(hidden), len(weight))
    rule = (reduction, ignore_index, label_smoothing, z_loss, rows)
    made: Tensor = _ops.linear_cross_entropy(hidden, weight, bias, target, class_weight, *rule)
    return made


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    rows: int = 0,
) -> Tensor:
    """Return `cross_entropy(logits, target)` in chunks. Logits: (rows, classes) or (batch, classes, ...)."""
    flat = logits.t().unsqueeze(0) if logits.dim() == 2 else logits.flatten(2)
    rows = rows or rows_for(target.numel(), flat.shape[1])
    rule = (reduction, ignore_index, label_smoothing, z_loss, rows)
    target_rows = target.reshape(-1)
    made: Tensor = _ops.chunked_cross_entropy(flat, target_rows, class_weight, *rule)
    return made.view(target.shape) if reduction == "none" else made
