"""Models the time of each operator of a profile on a named device, from its work and its bytes.

The roofline of Williams, Waterman and Patterson (CACM 52(4), 2009): an operator takes as long as its
arithmetic at the device's peak rate or its memory traffic at the peak bandwidth, whichever is longer, and at
least as long as the smallest kernel or copy in the device's trace. Real kernels reach only a part of either,
so this is a lower bound; reports mark it `modelled`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Literal

from msgspec import Struct

from torchtrim.costs.devices import DeviceSpec
from torchtrim.records.operator_names import item_bytes
from torchtrim.records.profile import Operator, Profile, TensorUse
from torchtrim.records.remembered import remembered

HOST_SECONDS = (
    5e-6  # Approximate time of eager dispatch for a small operator, not measured for each.
)
_KNOWN = 4096  # Arbitrary; more operators of different shapes than a large model has.
# First decile of the copies between host and device in the B200 trace of `devices.py`; A100: 1 us.
_COPY_SECONDS = 0.9e-6
_FREE = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias")
) | {"view", "_unsafe_view", "expand", "t", "transpose", "permute", "slice", "select", "as_strided"}
_COPIES = frozenset(("_to_copy", "copy_", "_copy_from", "_local_scalar_dense", "_pin_memory"))


class RooflineEstimate(Struct, frozen=True, kw_only=True):
    """Seconds of each operator on the device, and of its dispatch on the host."""

    source: Literal["modelled"] = "modelled"
    device_seconds: Sequence[float]
    host_seconds: Sequence[float]


@remembered
def estimate(profile: Profile, device: DeviceSpec) -> RooflineEstimate:
    """Estimate the seconds of each operator on the device and on the host.

    The host takes `HOST_SECONDS` for an operator, plus the time of the call if it launches a kernel.
    """
    is_on_device = [not storage.device.startswith("cpu") for storage in profile.storages]
    seconds = array("d", (_seconds(op, is_on_device, device) for op in profile.operators))
    busy = HOST_SECONDS + device.call
    host = array("d", (busy if kernel else HOST_SECONDS for kernel in seconds))
    return RooflineEstimate(device_seconds=seconds, host_seconds=host)


def _seconds(op: Operator, is_on_device: Sequence[bool], device: DeviceSpec) -> float:
    name = _base(op.name)
    uses = (*op.inputs, *op.outputs)
    on_device = [use for use in uses if is_on_device[use.storage]]
    if not on_device or _is_view(op, name):
        return 0.0
    sizes = [bytes_of(use) for use in on_device]
    largest = max(sizes)
    if name in _COPIES and len(on_device) < len(uses):
        return max(largest / device.link, _COPY_SECONDS)
    dtype = on_device[sizes.index(largest)].dtype
    work = max(sum(sizes) / device.bandwidth, flops(op) / device.peak(dtype))
    return max(work, device.floor)


@lru_cache(_KNOWN)
def _base(name: str) -> str:
    """Return an operator's name without its namespace and overload."""
    return name.rpartition("::")[2].split(".")[0]


def bytes_of(use: TensorUse) -> int:
    """Return the bytes of a tensor's elements."""
    return prod(use.shape) * item_bytes(use.dtype)


def _is_view(op: Operator, name: str) -> bool:
    """Return True if no kernel runs: the output is memory of an input, and nothing was written."""
    if name in _FREE:
        return True
    inputs = {use.storage for use in op.inputs}
    return bool(op.outputs) and not op.mutates and all(u.storage in inputs for u in op.outputs)


def flops(op: Operator) -> float:
    """Return the floating-point operations of an operator; a multiplication with an addition counts as two.

    They follow from the shapes for matrix products, convolutions and attention. Other operators count one
    for each element read or written, which memory traffic outweighs.
    """
    if (count := _COUNTS.get(_base(op.name))) is not None:
        inputs = [use.shape for use in op.inputs if use.shape]
        operations = count(inputs, [use.shape for use in op.outputs if use.shape])
        if operations > 0:
            return operations
    return float(max((prod(use.shape) for use in (*op.inputs, *op.outputs)), default=0))


Shapes = Sequence[tuple[int, ...]]


def _product(inputs: Shapes, outputs: Shapes) -> float:
    """Twice the elements of the first matrix, or batch of matrices, times the columns of the second."""
    pair = [shape for shape in inputs if len(shape) >= 2][-2:]
    return 2.0 * prod(pair[0]) * pair[1][-1] if len(pair) == 2 else 0.0


def _linear(inputs: Shapes, outputs: Shapes) -> float:
    return 2.0 * prod(outputs[0]) * inputs[0][-1] if inputs and outputs else 0.0


def _convolution(inputs: Shapes, outputs: Shapes) -> float:
    if len(inputs) < 2 or not outputs:
        return 0.0
    return 2.0 * prod(outputs[0]) * prod(inputs[1][1:])


def _convolution_backward(inputs: Shapes, outputs: Shapes) -> float:
    """The forward's count for each computed gradient: of the input, of the weight, or of both."""
    if len(inputs) < 3:
        return 0.0
    each = 2.0 * prod(inputs[0]) * prod(inputs[2][1:])
    gradients = sum(shape in (inputs[1], inputs[2]) for shape in outputs)
    return each * max(1, min(2, gradients))


def _attention(inputs: Shapes, outputs: Shapes) -> float:
    tensors = [shape for shape in inputs if len(shape) >= 3]
    if len(tensors) < 3:
        return 0.0
    query, key, value = tensors[:3]
    return 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(inputs: Shapes, outputs: Shapes) -> float:
    """Five products for the forward's two: scores again, and gradients of scores, query, key and value."""
    return 2.5 * _attention(inputs[1:], outputs)


_COUNTS: dict[str, Callable[[Shapes, Shapes], float]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul", "addbmm", "_scaled_mm"), _product),
    "linear": _linear,
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "conv2d"), _convolution),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            "scaled_dot_product_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        _attention_backward,
    ),
}
