"""The operators `torchtrim::relative_attention` and its backward, as torch knows them.

Both take a key in place of `Buckets`, so that graphs and exported programs carry plain values. Where
nothing looks at operators (no compiler, no mode, no transform), `attend` computes the same without the
dispatcher, which costs as much as the attention of a few tokens, and keeps the lookups of short
sequences for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchtrim.attention.buckets import maps_of
from torchtrim.attention.core import Dropout, Inputs, Path
from torchtrim.attention.paths import fastest, module_of


class Tables(NamedTuple):
    """The tables of a call, each or None.

    `q` and `k` are weights (H or 1, D, buckets) or lookups (B or 1, H or 1, L, buckets), `v` is
    (H or 1, buckets, D) or (B or 1, H or 1, buckets, D), `bias` is (H or 1, buckets).
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None


def lookup(x: Tensor, table: Tensor | None, scale: float, bias: Tensor | None) -> Tensor | None:
    """What a table says of each token of x (B, H, L, D): (B, H, L, buckets) of x's type."""
    if table is None:
        if bias is None:
            return None
        return bias.to(x.dtype)[None, :, None, :].expand(*x.shape[:3], -1).contiguous()
    found = table.to(x.dtype)
    if table.dim() == 3:
        found = _product(x, found * scale)
    if bias is not None:
        found = found + bias.to(x.dtype)[None, :, None, :]
    return found.expand(*x.shape[:3], -1).contiguous()


def _product(x: Tensor, table: Tensor) -> Tensor:
    if table.shape[0] == 1:
        return (x.reshape(-1, x.shape[-1]) @ table[0]).view(*x.shape[:3], table.shape[-1])
    return x @ table


def values_lookup(grad: Tensor, table: Tensor | None) -> Tensor | None:
    """The product of the output's gradient (B, H, L, D) and each row of the values' table."""
    if table is None:
        return None
    rows = table.to(grad.dtype).transpose(-1, -2)
    return _product(grad, rows) if rows.dim() == 3 else grad @ rows


def add_values(out: Tensor, sums: Tensor | None, table: Tensor | None) -> Tensor:
    """Add to the output what probabilities summed by bucket take from the values' table."""
    if sums is None or table is None:
        return out
    table = table.to(out.dtype)
    if table.dim() == 3 and table.shape[0] == 1:
        flat = out.view(-1, out.shape[-1])
        return flat.addmm_(sums.view(-1, sums.shape[-1]), table[0]).view(out.shape)
    return out.add_(sums @ table)


def table_gradient(
    x: Tensor, of_lookup: Tensor | None, table: Tensor | None, scale: float, of_x: Tensor
) -> Tensor | None:
    """The gradient of a query's or key's table; that of x (B, H, L, D) is added to `of_x`."""
    if table is None or of_lookup is None:
        return None
    if table.dim() == 4:
        return shrunk(of_lookup, table)
    weights = table.to(x.dtype) * scale
    if len(table) == 1:
        rows = of_lookup.reshape(-1, of_lookup.shape[-1])
        of_x.view(-1, of_x.shape[-1]).addmm_(rows, weights[0].T)
        return (x.reshape(-1, x.shape[-1]).T @ rows).mul_(scale)[None].to(table.dtype)
    of_x += of_lookup @ weights.transpose(1, 2)
    return shrunk((x.transpose(-1, -2) @ of_lookup).mul_(scale), table)


def values_gradient(sums: Tensor | None, grad: Tensor, table: Tensor | None) -> Tensor | None:
    """The gradient of the values' table."""
    if table is None or sums is None:
        return None
    if table.dim() == 3 and len(table) == 1:
        flat = sums.reshape(-1, sums.shape[-1]).T @ grad.reshape(-1, grad.shape[-1])
        return flat[None].to(table.dtype)
    return shrunk(sums.transpose(-1, -2) @ grad, table)


def bias_gradient(of_lookup: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The gradient of the bias."""
    if bias is None or of_lookup is None:
        return None
    return shrunk(of_lookup.sum(2), bias)


def shrunk(full: Tensor, like: Tensor) -> Tensor:
    """Sum what was broadcast from the shape of `like`, in its type."""
    extra = full.dim() - like.dim()
    if extra:
        full = full.sum(tuple(range(extra)))
    dims = [d for d, size in enumerate(like.shape) if size == 1 and full.shape[d] != 1]
    full = full.sum(dims, keepdim=True) if dims else full
    return full.to(like.dtype)


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
Lookups = tuple[Tensor | None, Tensor | None]
_SEVEN, _TENSORS = 7, 9
_PLAIN = (Tensor, torch.nn.Parameter)
_SHORT = 100  # As in compiled.py: the loops of short sequences are those that can use what is kept.


def attend(*call: Any) -> Tensor:
    """The operator's output, for its arguments."""
    if _is_watched(call[:_TENSORS]):
        found: Tensor = torch.ops.torchtrim.relative_attention(*call)[0]
    else:
        found = _Direct.apply(*call)  # type: ignore[no-untyped-call]
    return found


def _is_watched(tensors: tuple[Any, ...]) -> bool:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(x is not None and type(x) not in _PLAIN for x in tensors)


class _Direct(torch.autograd.Function):
    """The operator without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        out, lse, lookups = _exactly(_computed)(*call)
        kept = lookups if _is_short(call, lookups) else (None, None)
        ctx.save_for_backward(*call[:_TENSORS], out, lse, *kept)
        ctx.rest = call[_TENSORS:]
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all tensors that were given."""
        _check_once()
        *tensors, out, lse, k_lookup, q_lookup = ctx.saved_tensors
        call = (*tensors, *ctx.rest)
        if _is_watched((grad, *tensors)):
            found = torch.ops.torchtrim.relative_attention_backward(grad, out, lse, *call)
        else:
            lookups = None if k_lookup is None and q_lookup is None else (k_lookup, q_lookup)
            found = _exactly(_gradients)(grad, out, lse, lookups, *call)
        return _wanted(found, call)


def _is_short(call: Call, lookups: Lookups) -> bool:
    """Whether lookups of a short sequence are no more than half of q, k, v and the output."""
    q, v = call[0], call[2]
    kept = sum(one.nbytes for one in lookups if one is not None)
    return bool(q.shape[2] <= _SHORT and kept <= q.nbytes + v.nbytes)


def _forward(*call: Any) -> tuple[Tensor, Tensor]:
    return _computed(*call)[:2]


def _computed(*call: Any) -> tuple[Tensor, Tensor, Lookups]:
    q, _, v, tables, inputs, path = _unpacked(call)
    outcome = path.forward(inputs, with_sums=tables.v is not None)
    out = outcome.out.view(*q.shape[:3], v.shape[-1])
    out, sums = _cast(out, outcome.lse.dtype), outcome.sums
    spread = None if sums is None else sums.view(*q.shape[:3], sums.shape[-1])
    out = add_values(out, spread, tables.v)
    lookups = (inputs.k_lookup, inputs.q_lookup)
    return _cast(out, q.dtype), outcome.lse.view(q.shape[:3]), lookups


def _backward(grad: Tensor, out: Tensor, lse: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return _gradients(grad, out, lse, None, *call)


def _gradients(
    grad: Tensor, out: Tensor, lse: Tensor, lookups: Lookups | None, *call: Any
) -> tuple[Tensor, ...]:
    q, k, v, tables, inputs, path = _unpacked(call, lookups)
    grad = _cast(grad, lse.dtype).contiguous()
    delta = (grad * out).sum(-1).view(inputs.q.shape[:2])
    v_lookup = values_lookup(grad, tables.v)
    found = path.backward(
        inputs,
        _heads(_cast(grad, inputs.q.dtype)),
        lse.view(inputs.q.shape[:2]),
        delta,
        None if v_lookup is None else _heads(v_lookup),
    )
    of_q, of_k, of_v = (one.view(x.shape) for one, x in zip(found[:3], (q, k, v), strict=True))
    of_k_lookup, of_q_lookup, sums = (
        None if one is None else one.view(*q.shape[:3], one.shape[-1]) for one in found[3:]
    )
    scale = inputs.scale
    wide_q, wide_k = (_cast(x, lse.dtype) for x in (q, k))
    of_k_table = table_gradient(wide_q, of_k_lookup, tables.k, scale, of_q)
    of_q_table = table_gradient(wide_k, of_q_lookup, tables.q, scale, of_k)
    of_v_table = values_gradient(sums, grad, tables.v)
    of_bias = bias_gradient(of_k_lookup, tables.bias)
    of_tables = (of_q_table, of_k_table, of_v_table, of_bias)
    return (
        *(_cast(one, x.dtype) for one, x in zip((of_q, of_k, of_v), (q, k, v), strict=True)),
        *(q.new_empty(0) if one is None else one for one in of_tables),
    )


def _unpacked(
    call: Call, lookups: Lookups | None = None
) -> tuple[Tensor, Tensor, Tensor, Tables, Inputs, Path]:
    q, k, v, q_table, k_table, v_table, bias, mask, seed, buckets, dropout_p, scale, path = call
    tables = Tables(q_table, k_table, v_table, bias)
    exact = torch.promote_types(q.dtype, torch.float32)
    name = fastest(q) if path == "auto" else path
    kept = q.dtype if name == "triton" else exact
    wide_q, wide_k = (_cast(x, exact).contiguous() for x in (q, k))
    if lookups is None:
        of_q, of_k = lookup(wide_q, k_table, scale, bias), lookup(wide_k, q_table, scale, None)
        lookups = of_q if of_q is None else _heads(of_q), of_k if of_k is None else _heads(of_k)
    inputs = Inputs(
        _heads(_cast(wide_q, kept)),
        _heads(_cast(wide_k, kept)),
        _heads(_cast(v, kept).contiguous()),
        lookups[0],
        lookups[1],
        None if mask is None else mask.expand(*q.shape[:3], q.shape[2]),
        None if seed is None else Dropout(dropout_p, seed),
        scale,
        maps_of(buckets, q.device),
    )
    return q, k, v, tables, inputs, cast(Path, module_of(name))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


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
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.rest = inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])


def _check_once() -> None:
    """Raises `RuntimeError` where gradients are to be differentiated again: a part could be lost."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "relative attention cannot be differentiated twice: `create_graph=True` went through it."
        )


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    _check_once()
    *tensors, out, lse = ctx.saved_tensors
    call = (*tensors, *ctx.rest)
    return _wanted(torch.ops.torchtrim.relative_attention_backward(grad, out, lse, *call), call)


def _wanted(found: tuple[Tensor, ...], call: Call) -> tuple[Tensor | None, ...]:
    pairs = zip(found, call[:_SEVEN], strict=True)
    wanted = (one if given is not None else None for one, given in pairs)
    return (*wanted, *(None,) * (len(call) - _SEVEN))


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
