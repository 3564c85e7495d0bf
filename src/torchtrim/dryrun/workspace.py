"""Bytes that the CPU's kernels need while they run, beside their results: what no dispatch mode sees.

They depend on the processor: the same convolution takes 2.3 MB of scratch with AVX-512, 0.8 MB with AMX too,
2.7 MB with AVX2 alone. So each distinct call of an operator that needs any is run here once, on zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.dispatch.modes import tensors_among
from torchtrim.dryrun.machine import machine, needed

_MOST_BYTES = 2**28
"""Inputs and results of a call that is run: the memory that an estimate may take where the step has none."""
_MOST_FLOPS, _MOST_FLOPS_OF_HALVES = 2**35, 2**31
"""A second on one core. Half precision is emulated where the processor has no instructions for it."""
_RECURRENT = "aten::mkldnn_rnn_layer"
_PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"))
_MEASURED = frozenset(
    (
        *_PRODUCTS,
        "aten::convolution",
        "aten::_convolution",
        "aten::convolution_backward",
        _RECURRENT,
        f"{_RECURRENT}_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::native_batch_norm_backward",
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
        "aten::roll",
        "aten::_native_multi_head_attention",
        "aten::upsample_bilinear2d",
        "aten::upsample_nearest2d",
        "torchtrim::relative_attention",
        "torchtrim::relative_attention_backward",
        "aten::_safe_softmax",
        "aten::logsumexp",
        "aten::native_dropout",
        "aten::mse_loss",
        "aten::smooth_l1_loss",
        "aten::huber_loss",
        "aten::binary_cross_entropy_with_logits",
    )
)
"""Operators with scratch beside their results."""
_ATTENTION: Callable[..., int] = flop_counter.sdpa_flop_count
_ATTENTION_BACKWARD: Callable[..., int] = flop_counter.sdpa_backward_flop_count
_ONEDNN_COMPUTES: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}


def workspace(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Bytes beside the results of an operator on the CPU; None where a call cannot be run to tell."""
    name = func.name().partition(".")[0]
    promoted = _promoted(args) if torch.Tag.pointwise in func.tags else 0
    if name not in _MEASURED or (name in _PRODUCTS and not _packs(args)):
        return promoted
    size = _measured(func, name, args, kwargs, result)
    return None if size is None else size + promoted


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


def _packs(args: Any) -> bool:
    """Whether oneDNN packs the matrices of a product: those in half precision that it computes."""
    computes = _ONEDNN_COMPUTES.get(args[0].dtype)
    return computes is not None and computes()


def _measured(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int | None:
    if _is_large(name, func, args, kwargs, result):
        return None
    key = f"{func} {_key((args, kwargs))} {torch.get_num_threads()} {torch.is_grad_enabled()}"
    return machine().once(key, lambda: _tried(func, name, args, kwargs))


def _is_large(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    tensors = [*tensors_among((args, *kwargs.values(), result))]
    halves = any(one.is_floating_point() and one.itemsize < 4 for one in tensors)
    most = _MOST_FLOPS_OF_HALVES if halves else _MOST_FLOPS
    if sum(one.nbytes for one in tensors) > _MOST_BYTES:
        return True
    return _flops(name, func, args, kwargs, result) > most


def _flops(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Operations of products; 0 for what only goes through its tensors."""
    if name.startswith(_RECURRENT):
        return int(6 * math.prod(args[0].shape[:-1]) * (args[1].numel() + args[2].numel()))
    if name.endswith("attention_for_cpu"):
        return _ATTENTION(*(one.shape for one in args[:3]))
    if name.endswith("attention_for_cpu_backward"):
        return _ATTENTION_BACKWARD(*(one.shape for one in args[:4]))
    count = flop_counter.flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _tried(func: Any, name: str, args: Any, kwargs: Any) -> int:
    """Bytes of one call on zeros. Leaves modes and random numbers as they are."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        state = torch.default_generator.get_state()
        try:
            given, named = _zeros(args), _zeros(kwargs)
            if name == f"{_RECURRENT}_backward":
                given[-1] = _reserve(given)
            if func.namespace == "torchtrim":
                func(*given, **named)  # Its threads keep their blocks from the first call on.
            return needed(lambda: func(*given, **named))
        finally:
            torch.default_generator.set_state(state)


def _reserve(args: list[Any]) -> torch.Tensor:
    """What an LSTM's forward keeps for backward: of the size that this processor's kernel reads."""
    x, *weights, hidden, cell = args[:7]
    reverse, mode, size, layers, biases, train, both, sizes, first = args[13:22]
    with torch.enable_grad():
        kept: torch.Tensor = torch.ops.aten.mkldnn_rnn_layer.default(
            *(x, *weights, hidden, cell, reverse, sizes, mode, size, layers, biases, both, first),
            train,
        )[3]
    return kept


def _zeros(value: Any) -> Any:
    """The value with tensors of zeros, in the same layout, in place of its own."""
    if isinstance(value, torch.Tensor):
        count = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        flat = torch.zeros(count + 1 if value.numel() else 0, dtype=value.dtype, device="cpu")
        return flat.as_strided(value.shape, value.stride())
    if isinstance(value, dict):
        return {name: _zeros(one) for name, one in value.items()}
    return [_zeros(one) for one in value] if isinstance(value, (list, tuple)) else value


def _key(value: Any) -> str:
    """What tells an argument from others that need other bytes."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    if isinstance(value, dict):
        return " ".join(f"{name}={_key(one)}" for name, one in value.items())
    return f"[{' '.join(map(_key, value))}]" if isinstance(value, (list, tuple)) else repr(value)
