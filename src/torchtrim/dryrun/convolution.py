"""Bytes that convolutions on the CPU need beside their results.

oneDNN computes on blocked layouts: channels in groups of 16, or 8 where the processor has no AVX-512. So
inputs, weights and results are copied, one after the other, and results are copied back. Which of these
are alive at once follows pytorch/pytorch, aten/src/ATen/native/mkldnn/Conv.cpp, and intel/ideep,
include/ideep/operators/conv.hpp; when oneDNN is chosen, aten/src/ATen/native/Convolution.cpp
(`ConvParams::use_mkldnn`). What oneDNN's own implementations add was measured with torch 2.13 on a
processor with AVX-512, for 200 shapes forward and backward; `machine` corrects it on others.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from torchtrim.dryrun.machine import Call, Try, machine, needed, zeros

_NARROW = 16
_WIDE_KERNEL = 15
_LONG_ROW, _FAR = 32, 8
_UNFOLDED = 811_008
_MANY_ELEMENTS = 20480
_HALF_SCRATCH = 14_000
_MANY_POINTS = 16
_MOST_WORK, _MOST_WORK_OF_HALVES = 2**28, 2**24

_HALVES = (torch.bfloat16, torch.float16)


class _Sizes(NamedTuple):
    """Bytes of input, weight and output as they are, and in oneDNN's blocks.

    `eighths`: input, output and weight in blocks of 8, whatever the processor.
    """

    x: int
    w: int
    y: int
    blocked_x: int
    blocked_w: int
    blocked_y: int
    eighths: tuple[int, int, int]


class _Case(NamedTuple):
    """One convolution. Shapes start with samples and channels; `y` is that of the output. `reach` is how
    far the last of a kernel's points is from its first, in columns."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    dtype: torch.dtype
    strided: bool
    dilated: bool
    reach: int
    transposed: bool
    groups: int
    channels_last: bool
    weight_last: bool


def forward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `aten::convolution`."""
    x, w, bias = args[:3]
    case = _case(x, w, tuple(result.shape), args[3], args[5], args[6], args[8])
    if case.x[0] < 1:
        return 0

    def attempt(samples: int) -> int:
        given = (zeros(x, samples), zeros(w), None if bias is None else zeros(bias), *args[3:])
        return needed(lambda: torch.ops.aten.convolution.default(*given))

    return _on_this_machine(
        case,
        ("forward", bias is not None, _layout(x), _layout(w), *args[3:]),
        lambda samples: _forward(_with(case, samples), summed=bias is not None),
        attempt,
    )


def backward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `aten::convolution_backward`: of both gradients, one after the other."""
    gradient, x, w, _, stride, _, dilation, transposed, _, groups, wanted = args
    case = _case(x, w, tuple(gradient.shape), stride, dilation, transposed, groups)
    if case.x[0] < 1:
        return 0
    copied = 0 if gradient.is_contiguous() else gradient.nbytes // case.x[0]

    def attempt(samples: int) -> int:
        given = (zeros(gradient, samples), zeros(x, samples), zeros(w), *args[3:])
        return needed(lambda: torch.ops.aten.convolution_backward.default(*given))

    return _on_this_machine(
        case,
        ("backward", *map(_layout, (gradient, x, w)), *args[3:]),
        lambda samples: _backward(_with(case, samples), copied * samples, wanted),
        attempt,
    )


def _on_this_machine(case: _Case, told: Any, formula: Try, attempt: Try) -> int:
    threads = torch.get_num_threads()
    name = f"convolution {case._replace(x=case.x[1:], y=case.y[1:])} {told} {threads}"
    of_sample = math.prod(case.x[1:]) + math.prod(case.y[1:])
    small = case.x if case.transposed else case.y
    work = max(math.prod(small[1:]) * math.prod(case.w[1:]), of_sample, 1)
    most = (_MOST_WORK_OF_HALVES if case.dtype in _HALVES else _MOST_WORK) // work
    few = _MANY_POINTS if case.x[0] >= _MANY_POINTS and _is_point(case) else 2
    call = Call(name, formula, attempt, of_sample * case.dtype.itemsize, most, few)
    return machine().needs(call, case.x[0])


def _with(case: _Case, samples: int) -> _Case:
    return case._replace(x=(samples, *case.x[1:]), y=(samples, *case.y[1:]))


def _layout(tensor: Any) -> tuple[int, ...]:
    """Its strides, whatever the number of samples."""
    return tuple(tensor.stride())


def _forward(case: _Case, *, summed: bool) -> int:
    if not _uses_onednn(case):
        whole = case.transposed or case.strided or not _is_point(case)
        return _columns(case) * case.x[0] if whole else 0
    at = _sizes(case)
    if case.channels_last:
        return at.w * (1 if case.weight_last else 2)
    if case.transposed:
        return _transposed(case, at, summed=summed)
    return _plain(case, at)


def _backward(case: _Case, copied: int, wanted: Any) -> int:
    if not _uses_onednn(case):
        return 0 if _is_point(case) and not case.strided else _columns(case) * case.x[0]
    if case.channels_last:
        return _backward_last(case, _sizes(case))
    transposed = case.transposed
    if transposed:
        case = case._replace(x=case.y, y=case.x, transposed=False)
    at = _sizes(case)
    of_input = 0
    if wanted[0]:
        of_input = _plain(case, at) if transposed else _of_input(case, at)
    if not wanted[1]:
        return copied + of_input
    return copied + max(of_input - at.w, _of_weight(case, at))


def _plain(case: _Case, at: _Sizes) -> int:
    """A convolution that is not transposed, or the gradient of the input of one that is."""
    if _reaches_out(case):
        return max(at.y, min(_columns(case), _UNFOLDED))
    source = at.blocked_x if case.x[1] >= _NARROW else 0
    wide = 0
    if case.dtype in _HALVES and _is_point(case):
        source, wide = at.blocked_x, 2 * at.blocked_y // case.x[0] * torch.get_num_threads()
    running = source + at.blocked_w + at.blocked_y - at.y + _unstrided(case, at) + wide
    return max(at.blocked_y, running)


def _transposed(case: _Case, at: _Sizes, *, summed: bool) -> int:
    """With strides it is a matrix product on what is laid out with channels last; else it is blocked.
    Where there is a bias (`summed`), it adds up beside the result, with strides where that is no multiple
    of the input."""
    single = 4 // case.dtype.itemsize if summed else 0
    if not case.strided:
        running = (1 + single) * at.blocked_y + at.blocked_x + at.blocked_w - at.y
        return max(at.blocked_y, running)
    image = at.x // max(case.x[0], 1) * torch.get_num_threads()
    whole = all(y % x == 0 for x, y in zip(case.x[2:], case.y[2:], strict=True))
    sums = 0 if whole else single * at.y
    return max(2 * at.y, at.x + at.blocked_w + image + sums)


def _backward_last(case: _Case, at: _Sizes) -> int:
    if case.groups > 1:
        outer, inner = _padded(case.w[0] // case.groups), _padded(case.w[1])
        each = outer * inner * math.prod(case.w[2:]) * case.dtype.itemsize
        return each * case.groups + at.w
    return at.w * (2 if case.weight_last else 3)


def _of_input(case: _Case, at: _Sizes) -> int:
    if _reaches_out(case):
        return max(at.x, _columns(case))
    if case.strided and case.groups == 1:
        image = math.prod(case.y[2:]) * max(case.y[1], _NARROW) * case.dtype.itemsize
        return max(2 * at.x, at.y + at.blocked_w + 2 * image * torch.get_num_threads())
    return max(at.blocked_x, at.blocked_y + at.blocked_w + at.blocked_x - at.x)


def _of_weight(case: _Case, at: _Sizes) -> int:
    if _by_columns(case):
        return _columns(case) + 4 * at.w
    if case.dtype in _HALVES:
        return _of_half_weight(case, at)
    few, narrow = 4, case.x[1]
    source, kept_y, kept_w = at.blocked_x, at.blocked_y, at.blocked_w
    if narrow <= few:
        source = 0
    elif narrow < _NARROW and case.groups == 1:
        source, kept_y, kept_w = at.eighths
    return max(kept_w, source + kept_y + kept_w - at.w + _unstrided(case, at) // 2)


def _of_half_weight(case: _Case, at: _Sizes) -> int:
    """Half precision: each thread turns an image of both, and adds up in single precision."""
    if _is_point(case):
        return at.blocked_x + at.blocked_y + 3 * at.blocked_w - at.w
    narrow = case.x[1] < _NARROW
    if narrow and case.y[1] < _NARROW:
        return _columns(case) * torch.get_num_threads()
    source = 0 if narrow else at.blocked_x
    turned = (source + at.blocked_y) // case.x[0] * torch.get_num_threads()
    return source + at.blocked_y + 3 * at.blocked_w - at.w + turned + _HALF_SCRATCH


def _by_columns(case: _Case) -> bool:
    """Whether the weight's gradient is a matrix product on unfolded inputs."""
    if case.groups == 1:
        wide = case.dilated and case.reach >= case.x[-1]
        return wide or max(case.w[2:]) > _WIDE_KERNEL
    if case.groups == case.x[1]:
        return max(case.w[2:]) > 3
    return case.w[1] % _NARROW != 0


def _reaches_out(case: _Case) -> bool:
    """Whether a dilated kernel begins so far outside the image that its product is of unfolded inputs."""
    padded = (case.y[-1] - case.x[-1] + case.reach) // 2
    plain = case.groups == 1 and not case.strided and case.dtype is torch.float32
    far = padded > case.x[-1] or (padded >= _FAR and case.x[-1] >= _LONG_ROW)
    return plain and case.dilated and far


def _unstrided(case: _Case, at: _Sizes) -> int:
    """A strided convolution of single points first copies the points that it uses, an image a thread."""
    if not case.strided or math.prod(case.w[2:]) > 1 or case.groups > 1:
        return 0
    image = case.x[1] * math.prod(case.y[2:]) * case.dtype.itemsize
    return image * torch.get_num_threads()


def _columns(case: _Case) -> int:
    """Bytes of one image unfolded."""
    small = case.x if case.transposed else case.y
    return math.prod(case.w[1:]) * math.prod(small[2:]) * case.dtype.itemsize


def _is_point(case: _Case) -> bool:
    return math.prod(case.w[2:]) == 1


def _uses_onednn(case: _Case) -> bool:
    if case.dtype in _HALVES:
        return True
    if case.dtype is not torch.float32:
        return False
    wide = math.prod(case.w[2:]) > 1 or case.strided or case.dilated
    if not (wide or case.x[0] >= _MANY_POINTS or torch.get_num_threads() > 1):
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
        dilation[-1] * (w.shape[-1] - 1),
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
    each = w // max(case.w[0] * case.w[1], 1)
    eighths = (
        _blocked(case.x, item, 8),
        _blocked(case.y, item, 8),
        each * _padded(case.w[0], 8) * _padded(case.w[1], 8),
    )
    blocked_x, blocked_y = _blocked(case.x, item), _blocked(case.y, item)
    return _Sizes(x, w, y, blocked_x, each * outer * inner, blocked_y, eighths)


def _blocked(shape: tuple[int, ...], item: int, block: int = 0) -> int:
    return math.prod((shape[0], _padded(shape[1], block), *shape[2:])) * item


def _padded(channels: int, block: int = 0) -> int:
    """Channels in whole blocks; by default of those that the processor has."""
    block = block or (16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8)
    return -(-channels // block) * block
