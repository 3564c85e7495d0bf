"""Bytes that the CPU's kernels need while they run, beside their results: what no dispatch mode sees.

The table was measured with torch 2.13: each operator alone, by the allocator's own events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchtrim.dispatch.modes import tensors_among
from torchtrim.dryrun import attention, convolution, recurrent, relative
from torchtrim.dryrun.machine import machine, needed

Workspace = Callable[[Any, Any, Any, Any], int]
_HALF_GEMM = 198_272
"""With bfloat16 on a processor with AVX-512, a thread."""
_LARGE = 512
_QUICK = 1 << 26
"""A product of so many multiplications takes no time, and is tried."""
_ONEDNN_COMPUTES: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}


def workspace(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Bytes beside the results of an operator on the CPU; 0 for one that is not in the table."""
    name = func.name().partition(".")[0]
    size = _TABLE[name](func, args, kwargs, result) if name in _TABLE else 0
    if torch.Tag.pointwise in func.tags:
        size += _promoted(args)
    return size


def _promoted(args: Any) -> int:
    """Operands of several types are first brought to one, where they are not single numbers."""
    tensors = [tensor for tensor in args if isinstance(tensor, torch.Tensor) and tensor.dim()]
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) < 2:
        return 0
    common = tensors[0].dtype
    for tensor in tensors[1:]:
        common = torch.promote_types(common, tensor.dtype)
    others = (tensor for tensor in tensors if tensor.dtype not in (common, torch.bool))
    return int(sum(tensor.numel() * common.itemsize for tensor in others))


def _norm_backward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """BatchNorm: the gradient is computed beside itself where it and the input lie alike."""
    gradient, x = args[0], args[1]
    alike = gradient.is_contiguous() == x.is_contiguous()
    return int(x.nbytes) if alike else 0


def _layer_norm(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """What does not lie in order is copied."""
    return 0 if args[0].is_contiguous() else int(args[0].nbytes)


def _layer_norm_backward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Each thread sums the gradients of weight and bias."""
    rows = 2 * torch.get_num_threads() * math.prod(args[2])
    copied = int(sum(tensor.nbytes for tensor in args[:2] if not tensor.is_contiguous()))
    return copied + (rows * 4 if args[5] is not None else 0)


def _resized(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Interpolation copies input and output to channels last for small outputs: those of at most 128
    rows and columns (aten/src/ATen/native/cpu/UpSampleKernel.cpp, `_use_vectorized_kernel_cond_2d`)."""
    small = result.shape[-1] + result.shape[-2] <= 128 and result.shape[1] > 1
    return args[0].nbytes + result.nbytes if small and args[0].is_contiguous() else 0


def _resized_linearly(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """As `_resized`; images of three channels too are copied, whatever their size."""
    if args[0].shape[1] == 3 and args[0].is_contiguous():
        return int(args[0].nbytes + result.nbytes)
    return _resized(func, args, kwargs, result)


def _roll(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """One dimension after the other."""
    return int(result.nbytes) if len(args) > 2 and len(args[2]) > 1 else 0


def _fused_attention(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The fast path of `nn.MultiheadAttention` in evaluation: projections, then all scores."""
    query, key, heads = args[0], args[1], args[4]
    scores = query.shape[0] * heads * query.shape[1] * key.shape[1] * query.dtype.itemsize
    return int(max(5 * query.nbytes, 2 * query.nbytes + scores))


def _safe_softmax(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Which elements are minus infinity, and which rows are so wholly."""
    x = args[0]
    return int(x.numel() + x.numel() // max(x.shape[-1], 1) + 4)


def _one_more(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """One value for each element, before they are reduced."""
    return int(args[0].nbytes)


def _of_loss(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """One value for each element, where they are reduced."""
    return int(args[0].nbytes) if result.dim() < args[0].dim() else 0


def _of_logits(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """As `_of_loss`; one more value for each element whether they are reduced or not."""
    return int(args[0].nbytes) + _of_loss(func, args, kwargs, result)


def _gemm(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """In half precision oneDNN packs the matrices by blocks, and the first as a whole where transposed.

    Where the processor has no instructions for it, torch's own loops compute, and pack nothing.
    """
    matrix = args[1] if func.name().startswith(("aten::addmm", "aten::baddbmm")) else args[0]
    if matrix.dtype not in _ONEDNN_COMPUTES or not _ONEDNN_COMPUTES[matrix.dtype]():
        return 0
    whole = sum(tensor.nbytes for tensor in tensors_among(args)) + result.nbytes
    blocks = min(_blocks_of(matrix.dtype), 2 * whole)
    if matrix.dim() == 2 and matrix.numel() * result.shape[-1] <= _QUICK:
        blocks = _blocks_tried(matrix, result.shape[-1], blocks)
    return int(blocks if matrix.stride(-1) == 1 else blocks + matrix.nbytes)


def _blocks_of(dtype: torch.dtype) -> int:
    """What a product of large matrices packs at a time, on all threads."""
    threads = torch.get_num_threads()

    def attempt() -> int:
        square = torch.zeros(_LARGE, _LARGE, dtype=dtype, device="cpu")
        return needed(lambda: torch.mm(square, square))

    found = machine().once(f"blocks of mm {dtype} {threads}", attempt)
    return _HALF_GEMM * threads if found is None else found


def _blocks_tried(matrix: Any, columns: int, most: int) -> int:
    """What a product packs of which one dimension may be smaller than a block: tried, or else `most`."""
    (rows, inner), dtype = matrix.shape[-2:], matrix.dtype
    threads = torch.get_num_threads()

    def attempt() -> int:
        first, second = (
            torch.zeros(size, dtype=dtype, device="cpu")
            for size in ((rows, inner), (inner, columns))
        )
        return needed(lambda: torch.mm(first, second))

    found = machine().once(f"blocks of mm {rows}x{inner}x{columns} {dtype} {threads}", attempt)
    return most if found is None else min(found, most)


_TABLE: dict[str, Workspace] = {
    "aten::convolution": convolution.forward,
    "aten::_convolution": convolution.forward,
    "aten::convolution_backward": convolution.backward,
    "aten::mkldnn_rnn_layer": recurrent.forward,
    "aten::mkldnn_rnn_layer_backward": recurrent.backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention.forward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention.backward,
    "aten::native_batch_norm_backward": _norm_backward,
    "aten::native_layer_norm": _layer_norm,
    "aten::roll": _roll,
    "aten::_native_multi_head_attention": _fused_attention,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::upsample_bilinear2d": _resized_linearly,
    "aten::upsample_nearest2d": _resized,
    "torchtrim::relative_attention": relative.forward,
    "torchtrim::relative_attention_backward": relative.backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::logsumexp": _one_more,
    "aten::native_dropout": _one_more,
    "aten::mse_loss": _of_loss,
    "aten::smooth_l1_loss": _of_loss,
    "aten::huber_loss": _of_loss,
    "aten::binary_cross_entropy_with_logits": _of_logits,
    "aten::mm": _gemm,
    "aten::addmm": _gemm,
    "aten::bmm": _gemm,
    "aten::baddbmm": _gemm,
}
