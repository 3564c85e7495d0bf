"""The custom operator `torchtrim::relative_attention`, its backward, and the choice of a path.

Both operators take a key instead of `Buckets`, so that graphs and exported programs hold plain values. If
nothing observes operators (no compiler, mode or transform), `attend` bypasses the dispatcher, which costs as
much as the attention of a few tokens, and saves the lookups of short sequences for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchtrim.attention.buckets import maps_of
from torchtrim.attention.core import Dropout, Inputs, Path
from torchtrim.errors import UsageError

PATHS = {"pure": "pure", "compiled": "compiled", "triton": "triton_path"}
_NEEDS = {"compiled": "numba", "triton": "triton"}
_INSTALLED = {path: find_spec(needed) is not None for path, needed in _NEEDS.items()}


def available(path: str) -> bool:
    """Return True if the package that the path needs is installed."""
    return _INSTALLED.get(path, True)


def check(name: str) -> None:
    """Raise `UsageError` if a path does not exist or its package is not installed."""
    if name not in ("auto", *PATHS):
        raise UsageError(f"Unknown path {name!r}. Choose auto, {' or '.join(PATHS)}.")
    if not available(name):
        raise UsageError(
            f"The path {name!r} needs {_NEEDS[name]}, which is not installed. "
            f"Install it, or pass path='auto'."
        )


def fastest(q: Tensor) -> str:
    """Return the fastest installed path for the device and type of q."""
    exact = q.dtype != torch.float64
    if q.device.type == "cpu":
        return "compiled" if exact and available("compiled") else "pure"
    return "triton" if q.is_cuda and exact and available("triton") else "pure"


@cache
def module_of(name: str) -> ModuleType:
    """Import the module of a path."""
    return import_module(f"torchtrim.attention.{PATHS[name]}")


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
    """Return the lookup of each token of x (B, H, L, D) in a table: (B, H, L, buckets), of x's type."""
    if table is None:
        if bias is None:
            return None
        return bias.to(x.dtype)[None, :, None, :].expand(*x.shape[:3], -1).contiguous()
    result = table.to(x.dtype)
    if table.dim() == 3:
        result = _product(x, result * scale)
    if bias is not None:
        result = result + bias.to(x.dtype)[None, :, None, :]
    return result.expand(*x.shape[:3], -1).contiguous()


def _product(x: Tensor, table: Tensor) -> Tensor:
    if table.shape[0] == 1:
        return (x.reshape(-1, x.shape[-1]) @ table[0]).view(*x.shape[:3], table.shape[-1])
    return x @ table


def values_lookup(grad: Tensor, table: Tensor | None) -> Tensor | None:
    """Return the product of the output's gradient (B, H, L, D) with each row of the values' table."""
    if table is None:
        return None
    rows = table.to(grad.dtype).transpose(-1, -2)
    return _product(grad, rows) if rows.dim() == 3 else grad @ rows


def add_values(out: Tensor, sums: Tensor | None, table: Tensor | None) -> Tensor:
    """Add the product of the probabilities summed by bucket and the values' table to the output."""
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
    """Return the gradient of a query's or key's table, and add that of x (B, H, L, D) to `of_x`."""
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
    """Return the gradient of the values' table."""
    if table is None or sums is None:
        return None
    if table.dim() == 3 and len(table) == 1:
        flat = sums.reshape(-1, sums.shape[-1]).T @ grad.reshape(-1, grad.shape[-1])
        return flat[None].to(table.dtype)
    return shrunk(sums.transpose(-1, -2) @ grad, table)


def shrunk(full: Tensor, like: Tensor) -> Tensor:
    """Sum over the dimensions broadcast from `like`, and cast to its type."""
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
_SHORT = 100  # As in compiled.py: only the loops for short sequences can use saved lookups.


def attend(*call: Any) -> Tensor:
    """Return the operator's output for its arguments, bypassing the dispatcher if nothing observes it."""
    if _is_watched(call[:_TENSORS]):
        return cast(Tensor, torch.ops.torchtrim.relative_attention(*call)[0])
    return cast(Callable[..., Tensor], _DirectAttention.apply)(*call)


def _is_watched(tensors: tuple[Any, ...]) -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(x is not None and type(x) not in _PLAIN for x in tensors)
    )


class _DirectAttention(torch.autograd.Function):
    """The operator as an autograd function, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> Tensor:
        out, lse, lookups = _exactly(_computed)(*call)
        kept = lookups if _is_short(call, lookups) else (None, None)
        ctx.save_for_backward(*call[:_TENSORS], out, lse, *kept)
        ctx.rest = call[_TENSORS:]
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _check_once()
        *tensors, out, lse, k_lookup, q_lookup = ctx.saved_tensors
        call = (*tensors, *ctx.rest)
        if _is_watched((grad, *tensors)):
            gradients = torch.ops.torchtrim.relative_attention_backward(grad, out, lse, *call)
        else:
            lookups = None if k_lookup is None and q_lookup is None else (k_lookup, q_lookup)
            gradients = _exactly(_gradients)(grad, out, lse, lookups, *call)
        return _wanted(gradients, call)


def _is_short(call: Call, lookups: Lookups) -> bool:
    """Return True if the sequence is short and its lookups take at most as many bytes as q and v."""
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
    bias = tables.bias
    of_bias = None if bias is None or of_k_lookup is None else shrunk(of_k_lookup.sum(2), bias)
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
    q: Tensor = call[0]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in call[:_SEVEN])


def _save(ctx: Any, inputs: Call, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.rest = inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])


def _check_once() -> None:
    """Raise `RuntimeError` on double backward, which would silently lose a part of the gradient."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "relative attention cannot be differentiated twice: do not use `create_graph=True` with it."
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
    """Disable autocast in the function: it would compute products of lookups in a lower precision."""

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
