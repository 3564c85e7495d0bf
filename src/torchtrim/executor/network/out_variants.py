"""Out-variants: make an operator write to given memory without changing its result.

Most operators have an `out=` kernel. Generated ones (compute, then copy) save nothing and are not used,
nor are those of composite operators, which may compute differently. The other operators have an
implementation here, or run on slices of their samples, each copied to its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from torchtrim.dispatch.modes import is_composite
from torchtrim.executor.network.captured import NetworkValue, Op, Ref
from torchtrim.executor.network.convolution import (
    Convolution,
    convolution_of,
    convolve,
    planned_kernel,
    workspace_of,
)

aten = torch.ops.aten
Write = Callable[[tuple[Any, ...], dict[str, Any], Tensor], Any]
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}
_INDEX_BYTES = 8  # An index is an int64.


class OutVariant(NamedTuple):
    """An out-variant. `over`: it may overwrite an argument of the same geometry.

    `workspace`: bytes allocated on top of the result. `own`: the same if the operator allocates its own
    result. `always`: use it in any case, since the plain operator allocates more.
    """

    write: Write
    over: bool = False
    workspace: int = 0
    own: int = 0
    always: bool = False


_Way = Callable[[Op, tuple[NetworkValue, ...], int], OutVariant | None]


def way_of(
    op: Op, values: tuple[NetworkValue, ...], most: int, whole: float = 1.0
) -> OutVariant | None:
    """Return the operator's out-variant, or None.

    `most`: the largest bytes of a slice of more than one sample. `whole`: the size of the whole batch
    relative to these samples.
    """
    rest = [values[v].bytes for v in op.outputs[1:] if v >= 0]
    if op.outputs[0] < 0 or any(rest) or (not op.single and op.target not in _SPECIAL):
        return None
    convolution = convolution_of(op, values)
    if convolution is not None:
        return _convolution(convolution, op, values, most, whole)
    special = _SPECIAL.get(op.target)
    if special is not None and (variant := special(op, values, most)) is not None:
        return variant
    device = values[op.outputs[0]].device.type
    if not is_composite(op.target) and (overload := out_of(op.target, device)) is not None:
        return OutVariant(_to_out(overload), over=torch.Tag.pointwise in op.target.tags)
    return _sliced(op, values, most)


def out_of(target: OpOverload, device: str) -> OpOverload | None:
    """Return the `out=` overload with the same arguments that has its own kernel on the device."""
    key, has = _KEYS.get(device), torch._C._dispatch_has_kernel_for_dispatch_key
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    packet = target._overloadpacket
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [a for a in arguments if a.is_out]
        same = [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted
        if len(outs) == 1 and same and key is not None and has(candidate.name(), key):
            return candidate  # type: ignore[no-any-return]
    return None


def _to_out(overload: OpOverload) -> Write:
    (name,) = (a.name for a in overload._schema.arguments if a.is_out)

    def write(args: tuple[Any, ...], kwargs: dict[str, Any], place: Tensor) -> None:
        overload(*args, **kwargs, **{name: place})

    return write


def _argument(op: Op, values: tuple[NetworkValue, ...], number: int) -> NetworkValue | None:
    argument = op.args[number] if number < len(op.args) else None
    return values[argument.value] if isinstance(argument, Ref) else None


def _copy(op: Op, values: tuple[NetworkValue, ...], _most: int) -> OutVariant | None:
    """`clone` and casts. Nothing to do if the place is the argument's own."""

    def write(args: tuple[Any, ...], _kwargs: dict[str, Any], place: Tensor) -> None:
        if place is not args[0]:
            place.copy_(args[0])

    return OutVariant(write, over=True) if _argument(op, values, 0) is not None else None


def _linear(op: Op, values: tuple[NetworkValue, ...], _most: int) -> OutVariant | None:
    """Compute like torch: one product that includes the bias, or a product of rows and then the bias.

    Rows of a non-contiguous input are copied first. Under a dispatch mode, such as a recorder's, torch
    itself allocates such a result twice.
    """
    x, weight, out = _argument(op, values, 0), _argument(op, values, 1), values[op.outputs[0]]
    if x is None or weight is None or len(x.shape) < 2 or len(weight.shape) != 2:
        return None
    if not out.is_contiguous or not math.prod(out.shape) or not x.shape[-1]:
        return None
    at_once = len(x.shape) == 2 or x.is_contiguous

    def write(args: tuple[Any, ...], _kwargs: dict[str, Any], place: Tensor) -> None:
        given, turned = args[0], args[1].t()
        bias = args[2] if len(args) > 2 else None
        to = place.view(-1, place.shape[-1])
        if not at_once and not _by_rows(given, args[1]):
            torch.matmul(given, turned, out=place)
        elif bias is None or not at_once:
            torch.mm(given.reshape(-1, given.shape[-1]), turned, out=to)
        else:
            torch.addmm(bias, given.reshape(-1, given.shape[-1]), turned, out=to)
            return
        if bias is not None:
            place.add_(bias)

    if at_once:
        return OutVariant(write)
    return OutVariant(write, workspace=x.bytes, own=x.bytes + out.bytes, always=True)


def _by_rows(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch's `matmul` folds all rows into one product instead of one per matrix of the batch.

    Source: `should_fold` in ATen/native/LinearAlgebra.cpp.
    """
    sizes, strides = x.shape, x.stride()
    whole = all(strides[d] == strides[d + 1] * sizes[d + 1] for d in range(x.dim() - 2))
    return weight.requires_grad or whole


def _norm(op: Op, values: tuple[NetworkValue, ...], _most: int) -> OutVariant | None:
    """BatchNorm with running statistics: one multiplication and addition per element."""

    def write(args: tuple[Any, ...], _kwargs: dict[str, Any], place: Tensor) -> None:
        none = place.new_empty(0)
        aten.native_batch_norm.out(
            *args[:5], False, *args[5:], out=place, save_mean=none, save_invstd=none.clone()
        )

    x, mean = _argument(op, values, 0), _argument(op, values, 3)
    if x is None or mean is None or x.dtype != mean.dtype:
        return None
    return OutVariant(write, over=x.device.type == "cpu" and x.is_contiguous)


def _softmax(
    kernel: OpOverload, op: Op, values: tuple[NetworkValue, ...], _most: int
) -> OutVariant | None:
    def write(args: tuple[Any, ...], _kwargs: dict[str, Any], place: Tensor) -> None:
        kernel(args[0], args[1], False, out=place)

    x = _argument(op, values, 0)
    same = x is not None and x.dtype == values[op.outputs[0]].dtype
    return OutVariant(write) if same and len(op.args) == 2 and not op.kwargs else None


def _pool(op: Op, values: tuple[NetworkValue, ...], most: int) -> OutVariant | None:
    """Max pooling by rows of samples and channels, which share the memory for indices.

    torch's own operator allocates indices of eight bytes per element and discards them.
    """
    x, out = _argument(op, values, 0), values[op.outputs[0]]
    if x is None or len(x.shape) != 4 or not (x.is_contiguous and out.is_contiguous):
        return None
    one = math.prod(out.shape[2:]) * _INDEX_BYTES
    rows = out.shape[0] * out.shape[1]
    step = max(min(most // max(one, 1), rows), 1)

    def write(args: tuple[Any, ...], kwargs: dict[str, Any], place: Tensor) -> None:
        source, to = args[0].flatten(0, 1), place.flatten(0, 1)
        indices = to.new_empty((step, *to.shape[1:]), dtype=torch.long)
        for first in range(0, len(to), step):
            part = to[first : first + step]
            aten.max_pool2d_with_indices.out(
                source[first : first + step],
                *args[1:],
                **kwargs,
                out=part,
                indices=indices[: len(part)],
            )

    own = rows * one
    return OutVariant(write, workspace=step * one, own=own, always=step < rows)


def _convolution(
    found: Convolution, op: Op, values: tuple[NetworkValue, ...], most: int, whole: float
) -> OutVariant:
    """Run some samples at a time. Their result needs extra memory unless the kernel has `out=`."""
    samples = values[op.inputs[0]].shape[0]
    batch = round(samples * whole)
    kernel = planned_kernel(found, op, values, batch)
    one = -(-values[op.outputs[0]].bytes // samples) * (kernel != "Slow2d")

    def needs(step: int) -> int:
        return workspace_of(op, values, step, kernel) + one * step

    fitting = [2**power for power in range(samples.bit_length()) if needs(2**power) <= most]
    step = max(fitting, default=1)

    def write(args: tuple[Any, ...], _kwargs: dict[str, Any], place: Tensor) -> None:
        convolve(found, args, place, step, batch)

    own = workspace_of(op, values, samples, kernel)
    return OutVariant(write, workspace=needs(step), own=own, always=needs(step) < own or whole != 1)


def _scatter(view: Callable[..., Tensor]) -> OutVariant:
    """The functional form of assignments such as `x[:, ::2] = y`: a copy of `x` with a part replaced."""

    def write(args: tuple[Any, ...], kwargs: dict[str, Any], place: Tensor) -> None:
        whole, part, *where = args
        if place is not whole:
            place.copy_(whole)
        view(place, *where, **kwargs).copy_(part)

    return OutVariant(write, over=True)


def _pad(op: Op, values: tuple[NetworkValue, ...], _most: int) -> OutVariant | None:
    names = ("mode", "value") if op.target is aten.pad.default else ("value",)
    options = dict(zip(names, op.args[2:], strict=False)) | op.kwargs
    x, sides = _argument(op, values, 0), op.args[1]
    if x is None or options.get("mode", "constant") != "constant" or min(sides, default=0) < 0:
        return None
    number = options.get("value") or 0
    padded = range(len(x.shape) - 1, len(x.shape) - 1 - len(sides) // 2, -1)
    where = [(d, sides[2 * i], x.shape[d]) for i, d in enumerate(padded)]

    def write(args: tuple[Any, ...], _kwargs: dict[str, Any], place: Tensor) -> None:
        inside = place.fill_(number)
        for dimension, first, length in where:
            inside = inside.narrow(dimension, first, length)
        inside.copy_(args[0])

    return OutVariant(write)


_SPECIAL: dict[OpOverload, _Way] = {
    **dict.fromkeys((aten.clone.default, aten._to_copy.default), _copy),
    **dict.fromkeys((aten.to.dtype, aten.contiguous.default), _copy),
    # In torch's source `relu` is `clamp_min` with zero, which has an `out=`.
    aten.relu.default: lambda *_: OutVariant(
        lambda args, _, place: aten.clamp_min.out(args[0], 0, out=place), over=True
    ),
    aten.linear.default: _linear,
    aten._native_batch_norm_legit_no_training.default: _norm,
    aten.softmax.int: partial(_softmax, aten._softmax.out),
    aten.log_softmax.int: partial(_softmax, aten._log_softmax.out),
    aten.max_pool2d.default: _pool,
    **dict.fromkeys((aten.pad.default, aten.constant_pad_nd.default), _pad),
    aten.slice_scatter.default: lambda *_: _scatter(aten.slice.Tensor),
    aten.select_scatter.default: lambda *_: _scatter(aten.select.int),
}

_CONVOLUTIONS: dict[OpOverload, int] = {
    **{getattr(aten, f"conv{d}d").default: d + 2 for d in (1, 2, 3)},
    **{getattr(aten, f"conv{d}d").padding: d + 2 for d in (1, 2, 3)},
    aten.conv_transpose1d.default: 3,
    aten.conv_transpose2d.input: 4,
    aten.conv_transpose3d.input: 5,
}
_SAMPLEWISE: dict[OpOverload, int | None] = {
    **_CONVOLUTIONS,
    **{getattr(aten, f"adaptive_avg_pool{d}d").default: d + 2 for d in (1, 2, 3)},
    aten.max_pool3d.default: 5,
    aten.avg_pool1d.default: 3,
    aten.scaled_dot_product_attention.default: 4,
    aten.group_norm.default: None,
}
"""Operators with independent samples in the first dimension, with the number of dimensions of a batch.

An unbatched input of a convolution has channels there.
"""
_SAME_KERNEL = 16  # Samples from which torch selects the same convolution kernel as for more.


def samples_apart(op: Op, values: tuple[NetworkValue, ...]) -> tuple[int, ...]:
    """Return the arguments that can be split along their first dimension, none if samples interact."""
    if op.target not in _SAMPLEWISE:
        return ()
    is_attention = op.target is aten.scaled_dot_product_attention.default
    which = (0, 1, 2) if is_attention else (0,)
    arguments = [_argument(op, values, number) for number in which]
    dimensions = _SAMPLEWISE[op.target]
    if any(x is None or (dimensions and len(x.shape) != dimensions) for x in arguments):
        return ()
    return () if is_attention and not _plain_attention(op, arguments) else which


def _plain_attention(op: Op, arguments: list[NetworkValue | None]) -> bool:
    """Return True without mask and dropout, and with equal numbers of samples."""
    options = dict(zip(("attn_mask", "dropout_p"), op.args[3:5], strict=False)) | op.kwargs
    lengths = {x.shape[0] for x in arguments if x is not None}
    return options.get("attn_mask") is None and not options.get("dropout_p") and len(lengths) == 1


def _sliced(op: Op, values: tuple[NetworkValue, ...], most: int) -> OutVariant | None:
    """Run some samples at a time and copy each slice to its place.

    Convolutions need slices large enough for torch to select the same kernel as for the whole batch.
    """
    which, out = samples_apart(op, values), values[op.outputs[0]]
    least = _SAME_KERNEL if op.target in _CONVOLUTIONS else 1
    if not which or not out.shape or out.shape[0] < 2 * least or not out.bytes:
        return None
    if op.target in _CONVOLUTIONS and out.device.type != "cpu":
        return None
    one = -(-out.bytes // out.shape[0])
    step = max(min(most // one, out.shape[0] // 2), least)

    def write(args: tuple[Any, ...], kwargs: dict[str, Any], place: Tensor) -> None:
        for first in range(0, len(place), step):
            part = list(args)
            for number in which:
                part[number] = args[number][first : first + step]
            place[first : first + step].copy_(op.target(*part, **kwargs))

    return OutVariant(write, workspace=step * one)
