"""The operators `torchtrim::relative_attention` and its backward, as torch knows them.

Both take a key in place of `Buckets`, so that graphs and exported programs carry plain values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from torchtrim.attention.buckets import maps_of
from torchtrim.attention.core import Dropout, Inputs, Path
from torchtrim.attention.paths import fastest, module_of
from torchtrim.attention.tables import (
    Tables,
    add_values,
    bias_gradient,
    lookup,
    table_gradient,
    values_gradient,
    values_lookup,
)

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_table, Tensor? k_table, Tensor? v_table, "
    "Tensor? bias, Tensor? mask, Tensor? seed, str buckets, float dropout_p, float scale, str path"
)
_Library: Any = torch.library.Library
_library = _Library("torchtrim", "FRAGMENT")
_library.define(f"relative_attention({_ARGUMENTS}) -> (Tensor, Tensor)")
_library.define(
    f"relative_attention_backward(Tensor grad, Tensor out, Tensor lse, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
Call = tuple[Any, ...]
_SEVEN = 7


def _forward(*call: Any) -> tuple[Tensor, Tensor]:
    q, _, v, tables, inputs, path = _unpacked(call)
    outcome = path.forward(inputs, with_sums=tables.v is not None)
    out = outcome.out.view(*q.shape[:3], v.shape[-1]).to(outcome.lse.dtype)
    sums = outcome.sums
    spread = None if sums is None else sums.view(*q.shape[:3], sums.shape[-1])
    out = add_values(out, spread, tables.v)
    return out.to(q.dtype), outcome.lse.view(q.shape[:3])


def _backward(grad: Tensor, out: Tensor, lse: Tensor, *call: Any) -> tuple[Tensor, ...]:
    q, k, v, tables, inputs, path = _unpacked(call)
    grad = grad.to(lse.dtype).contiguous()
    delta = (grad * out).sum(-1).view(inputs.q.shape[:2])
    v_lookup = values_lookup(grad, tables.v)
    found = path.backward(
        inputs,
        _heads(grad.to(inputs.q.dtype)),
        lse.view(inputs.q.shape[:2]),
        delta,
        None if v_lookup is None else _heads(v_lookup),
    )
    of_q, of_k, of_v = (one.view(x.shape) for one, x in zip(found[:3], (q, k, v), strict=True))
    of_k_lookup, of_q_lookup, sums = (
        None if one is None else one.view(*q.shape[:3], one.shape[-1]) for one in found[3:]
    )
    scale = inputs.scale
    wide_q, wide_k = (x.to(lse.dtype) for x in (q, k))
    of_k_table = table_gradient(wide_q, of_k_lookup, tables.k, scale, of_q)
    of_q_table = table_gradient(wide_k, of_q_lookup, tables.q, scale, of_k)
    of_v_table = values_gradient(sums, grad, tables.v)
    of_bias = bias_gradient(of_k_lookup, tables.bias)
    of_tables = (of_q_table, of_k_table, of_v_table, of_bias)
    nothing = (q.new_empty(0) for _ in of_tables)
    return (
        *(one.to(x.dtype) for one, x in zip((of_q, of_k, of_v), (q, k, v), strict=True)),
        *(empty if one is None else one for one, empty in zip(of_tables, nothing, strict=True)),
    )


def _unpacked(call: Call) -> tuple[Tensor, Tensor, Tensor, Tables, Inputs, Path]:
    q, k, v, q_table, k_table, v_table, bias, mask, seed, buckets, dropout_p, scale, path = call
    tables = Tables(q_table, k_table, v_table, bias)
    exact = torch.promote_types(q.dtype, torch.float32)
    name = fastest(q) if path == "auto" else path
    kept = q.dtype if name == "triton" else exact
    wide_q, wide_k = (x.to(exact).contiguous() for x in (q, k))
    k_lookup = lookup(wide_q, k_table, scale, bias)
    q_lookup = lookup(wide_k, q_table, scale, None)
    inputs = Inputs(
        _heads(wide_q.to(kept)),
        _heads(wide_k.to(kept)),
        _heads(v.to(kept).contiguous()),
        None if k_lookup is None else _heads(k_lookup),
        None if q_lookup is None else _heads(q_lookup),
        None if mask is None else mask.expand(*q.shape[:3], q.shape[2]),
        None if seed is None else Dropout(dropout_p, seed),
        scale,
        maps_of(buckets, q.device),
    )
    return q, k, v, tables, inputs, cast(Path, module_of(name))


def _heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0] * x.shape[1], *x.shape[2:])


def _forward_fake(*call: Any) -> tuple[Tensor, Tensor]:
    q, v = call[0], call[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=exact)


def _backward_fake(grad: Tensor, out: Tensor, lse: Tensor, *call: Any) -> tuple[Tensor, ...]:
    given: tuple[Tensor | None, ...] = call[:_SEVEN]
    q: Tensor = call[0]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in given)


def _save(ctx: Any, inputs: Call, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.rest = inputs[9:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    found = torch.ops.torchtrim.relative_attention_backward(grad, out, lse, *tensors, *ctx.rest)
    wanted = (
        one if given is not None else None
        for one, given in zip(found, tensors[:_SEVEN], strict=True)
    )
    return (*wanted, *(None,) * (2 + len(ctx.rest)))


def _exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without autocast, which would lower products of lookups."""

    @wraps(function)
    def exact(first: Tensor, *rest: Any) -> Any:
        device = first.device.type
        if not torch.is_autocast_enabled(device):
            return function(first, *rest)
        with torch.autocast(device, enabled=False):
            return function(first, *rest)

    return exact


_library.impl("relative_attention", _exactly(_forward), "CompositeExplicitAutograd")
_library.impl("relative_attention_backward", _exactly(_backward), "CompositeExplicitAutograd")
torch.library.register_fake("torchtrim::relative_attention", _forward_fake, lib=_library)
torch.library.register_fake("torchtrim::relative_attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "torchtrim::relative_attention", _differentiate, setup_context=_save, lib=_library
)
