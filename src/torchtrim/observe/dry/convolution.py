"""Bytes that convolutions on the CPU need beside their results.

oneDNN computes on blocked layouts: channels in groups of 16, or 8 where the processor has no AVX-512. So
inputs, weights and results are copied, one after the other, and results are copied back. Which of these
are alive at once follows pytorch/pytorch, aten/src/ATen/native/mkldnn/Conv.cpp, and intel/ideep,
include/ideep/operators/conv.hpp; when oneDNN is chosen, aten/src/ATen/native/Convolution.cpp
(`ConvParams::use_mkldnn`). What oneDNN's own implementations add was measured with torch 2.13 on a
processor with AVX-512, for 70 shapes forward and backward.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

_NARROW = 16
_WIDE_KERNEL = 15
_MANY_ELEMENTS = 20480
_HALVES = (torch.bfloat16, torch.float16)


class _Sizes(NamedTuple):
    """Bytes of input, weight and output as they are, and in oneDNN's blocks."""

    x: int
    w: int
    y: int
    blocked_x: int
    blocked_w: int
    blocked_y: int


class _Case(NamedTuple):
    """One convolution. Shapes start with samples and channels; `y` is that of the output."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    dtype: torch.dtype
    strided: bool
    dilated: bool
    transposed: bool
    groups: int
    channels_last: bool
    weight_last: bool


def forward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `aten::convolution`."""
    case = _case(args[0], args[1], tuple(result.shape), args[3], args[5], args[6], args[8])
    if not _uses_onednn(case):
        return 0 if _is_pointwise(case) else _columns(case) * case.x[0]
    at = _sizes(case)
    if case.channels_last:
        return at.w * (1 if case.weight_last else 2)
    if case.transposed:
        return max(2 * at.y, at.blocked_x + at.blocked_w + at.y)
    source = at.blocked_x if case.x[1] >= _NARROW else 0
    running = source + at.blocked_w + at.blocked_y - at.y + _unstrided(case, at)
    return max(at.blocked_y, running)


def backward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `aten::convolution_backward`: of both gradients, one after the other."""
    gradient, x, w, _, stride, _, dilation, transposed, _, groups, wanted = args
    case = _case(x, w, tuple(gradient.shape), stride, dilation, transposed, groups)
    if not _uses_onednn(case):
        return 0 if _is_pointwise(case) else _columns(case) * case.x[0]
    at = _sizes(case)
    if case.channels_last:
        return _backward_last(case, at)
    copied = 0 if gradient.is_contiguous() else gradient.nbytes
    of_input = _of_input(case, at) if wanted[0] else 0
    if not wanted[1]:
        return copied + of_input
    return copied + max(of_input - at.w, _of_weight(case, at))


def _backward_last(case: _Case, at: _Sizes) -> int:
    if case.groups > 1:
        outer, inner = _padded(case.w[0] // case.groups), _padded(case.w[1])
        each = outer * inner * math.prod(case.w[2:]) * case.dtype.itemsize
        return each * case.groups + at.w
    return at.w * (2 if case.weight_last else 3)


def _of_input(case: _Case, at: _Sizes) -> int:
    if case.transposed:
        return at.x + at.y
    least = 2 * at.x if case.strided and case.groups == 1 else at.blocked_x
    return max(least, at.blocked_y + at.blocked_w + at.blocked_x - at.x)


def _of_weight(case: _Case, at: _Sizes) -> int:
    if case.transposed:
        return max(at.blocked_x + at.blocked_y, at.blocked_w)
    if _by_columns(case):
        return _columns(case) + 4 * at.w
    narrow = case.x[1]
    source = at.blocked_x if narrow > _NARROW // 2 else at.x if narrow > 4 else 0
    return max(
        at.blocked_w,
        source + at.blocked_y + at.blocked_w - at.w + _unstrided(case, at) // 2,
    )


def _by_columns(case: _Case) -> bool:
    """Whether the weight's gradient is a matrix product on unfolded inputs."""
    if case.groups == 1:
        return max(case.w[2:]) > _WIDE_KERNEL
    if case.groups == case.x[1]:
        return max(case.w[2:]) > 3
    return case.w[1] % _NARROW != 0


def _unstrided(case: _Case, at: _Sizes) -> int:
    """A strided convolution of single points first copies the points that it uses, an image a thread."""
    if not case.strided or math.prod(case.w[2:]) > 1 or case.groups > 1:
        return 0
    image = case.x[1] * math.prod(case.y[2:]) * case.dtype.itemsize
    return image * torch.get_num_threads()


def _columns(case: _Case) -> int:
    """Bytes of one image unfolded."""
    return math.prod(case.w[1:]) * math.prod(case.y[2:]) * case.dtype.itemsize


def _is_pointwise(case: _Case) -> bool:
    return math.prod(case.w[2:]) == 1 and not case.strided


def _uses_onednn(case: _Case) -> bool:
    if case.dtype in _HALVES:
        return True
    if case.dtype is not torch.float32:
        return False
    wide = math.prod(case.w[2:]) > 1 or case.strided or case.dilated
    if not (wide or case.x[0] >= 16 or torch.get_num_threads() > 1):
        return False
    return (
        case.groups > 1
        or min(case.w[2:]) > 3
        or case.x[0] > 1
        or math.prod(case.x) > _MANY_ELEMENTS
    )


def _case(
    x: Any, w: Any, y: tuple[int, ...], stride: Any, dilation: Any, transposed: bool, groups: int
) -> _Case:
    return _Case(
        tuple(x.shape),
        tuple(w.shape),
        y,
        x.dtype,
        any(one > 1 for one in stride),
        any(one > 1 for one in dilation),
        transposed,
        groups,
        _is_last(x) or _is_last(w),
        _is_last(w),
    )


def _is_last(tensor: Any) -> bool:
    """Whether it is laid out with channels last, and not also as usual."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return bool(tensor.is_contiguous(memory_format=torch.channels_last))


def _sizes(case: _Case) -> _Sizes:
    item = case.dtype.itemsize
    x, w, y = (math.prod(shape) * item for shape in (case.x, case.w, case.y))
    depthwise = case.groups > 1 and case.groups == case.x[1]
    grouped = case.groups > 1
    outer = _padded(case.w[0]) if not grouped or depthwise else case.w[0]
    inner = _padded(case.w[1]) if not grouped and case.w[1] >= _NARROW else case.w[1]
    blocked_w = w // max(case.w[0] * case.w[1], 1) * outer * inner
    return _Sizes(x, w, y, _blocked(case.x, item), blocked_w, _blocked(case.y, item))


def _blocked(shape: tuple[int, ...], item: int) -> int:
    return math.prod((shape[0], _padded(shape[1]), *shape[2:])) * item


def _padded(channels: int) -> int:
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    return -(-channels // block) * block
