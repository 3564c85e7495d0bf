"""CPU convolutions that write to given memory, identical bit for bit to torch's own.

torch chooses a kernel by the number of samples and threads, among other things
(`torch._C._select_conv_backend`), and kernels differ in their last bits. So the kernel is chosen for the
whole batch, as torch does, and runs on a few samples at a time. oneDNN's kernel has no `out=` and allocates
reordered copies of its input and result. The kernel by matrix product has `out=`, and allocates its unfolded
input. Samples do not affect each other's bits in either (measured on one and two threads, for kernel sizes 1
to 11, strides, groups and odd channels).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtrim.executor.network.captured import NetworkValue, Op, Ref

aten = torch.ops.aten
_DEFAULTS: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
"""The arguments from the fourth on."""
_DIMENSIONS = {aten.conv2d.default: 2, aten.conv3d.default: 3}


class Convolution(NamedTuple):
    """The parameters of a convolution."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def kernel(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
        """Return the name of the kernel that torch selects."""
        none = [0] * len(self.stride)
        chosen = torch._C._select_conv_backend(
            *(x, weight, bias, self.stride, self.padding, self.dilation),
            *(False, none, self.groups, None),
        )
        return str(chosen).rpartition(".")[2]


def convolution_of(op: Op, values: tuple[NetworkValue, ...]) -> Convolution | None:
    """Return the convolution of an operator on a CPU batch, or None for other operators."""
    dimensions = _DIMENSIONS.get(op.target)
    x = op.args[0] if op.args else None
    if dimensions is None or op.kwargs or not isinstance(x, Ref):
        return None
    value = values[x.value]
    if value.device.type != "cpu" or len(value.shape) != dimensions + 2 or not value.shape[0]:
        return None
    named = _DEFAULTS | dict(zip(_DEFAULTS, op.args[3:], strict=False))
    sizes = {name: _each(named[name], dimensions) for name in ("stride", "padding", "dilation")}
    return Convolution(**sizes, groups=int(named["groups"]))


def _each(argument: Any, dimensions: int) -> list[int]:
    numbers = list(argument) if isinstance(argument, (list, tuple)) else [argument]
    return numbers * dimensions if len(numbers) == 1 else numbers


def workspace_of(op: Op, values: tuple[NetworkValue, ...], samples: int, kernel: str) -> int:
    """Return the bytes that a convolution of some samples allocates on top of its result.

    Derived from allocator events. oneDNN: the larger of the reordered result and the reordered input and
    weight. Matrix product: the unfolded input, unless the kernel has one element.
    """
    x, weight, out = (values[v] for v in (*op.inputs[:2], op.outputs[0]))
    inside, result = (-(-v.bytes * samples // v.shape[0]) for v in (x, out))
    if kernel.startswith("Slow"):
        area, columns = math.prod(weight.shape[2:]), math.prod(out.shape[2:])
        return 0 if area == 1 else inside * area * columns // max(math.prod(x.shape[2:]), 1)
    return max(inside + weight.bytes, result)


def planned_kernel(found: Convolution, op: Op, values: tuple[NetworkValue, ...], batch: int) -> str:
    """Return the kernel for such a batch, selected on expanded tensors of one element."""
    x, weight, *rest = (
        torch.zeros((), dtype=values[a.value].dtype, device="cpu").expand(values[a.value].shape)
        for a in op.args[:3]
        if isinstance(a, Ref)
    )
    return found.kernel(_of_batch(x, batch), weight, rest[0] if rest else None)


def convolve(
    found: Convolution, args: tuple[Any, ...], place: Tensor, step: int, batch: int
) -> None:
    """Write the convolution to `place`, `step` samples at a time, by the kernel for the whole batch."""
    x, weight = args[:2]
    bias = args[2] if len(args) > 2 else None
    kernel = found.kernel(_of_batch(x, batch), weight, bias)
    step = step if kernel in ("Mkldnn", "Slow2d") else len(x)
    for first in range(0, len(x), step):
        part = slice(first, first + step)
        _write(found, kernel, x[part], weight, bias, place[part])


def _of_batch(x: Tensor, batch: int) -> Tensor:
    """Expand the first sample to the batch's size; torch reads only sizes."""
    return x[:1].expand(batch, *x.shape[1:])


def _write(
    found: Convolution, kernel: str, x: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor
) -> None:
    stride, padding, dilation, groups = found
    of_product = (x, weight, list(weight.shape[2:]), bias, stride, padding)
    if kernel == "Slow2d" and place.is_contiguous():
        aten._slow_conv2d_forward.output(*of_product, output=place)
    elif kernel == "Slow2d":
        place.copy_(aten._slow_conv2d_forward(*of_product))
    elif kernel == "Mkldnn":
        place.copy_(aten.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups))
    else:
        rest = (stride, padding, dilation, False, [0] * len(stride), groups)
        place.copy_(aten.convolution(x, weight, bias, *rest))
