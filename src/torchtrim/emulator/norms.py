"""Norms as on CUDA: cuDNN's batch norm and the fused RMS norm, with the CPU's values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._C import DispatchKey
from torch._prims_common import suggest_memory_format

from torchtrim.emulator.attention import plain_kernels
from torchtrim.syncs.base import Citation

_aten: Any = torch.ops.aten
_Maybe = torch.Tensor | None
_MOST_TRAINED, _MOST_EVALUATED, _MOST_ELEMENTS = 880_801, 65_535, 2**31 - 1
SOURCES = (
    Citation(
        repository="MetaX-MACA/mcPytorch",
        ref="b3db5eed",
        path="aten/src/ATen/native/Normalization.cpp",
        line=487,
        note="`_select_batch_norm_backend`, of release 2.4",
    ),
    Citation(
        repository="pytorch/pytorch",
        ref="v2.13.0",
        path="tools/autograd/derivatives.yaml",
        line=2773,
        note="cuDNN's batch norm saves mean, inverse deviation and a reserve",
    ),
    Citation(
        repository="pytorch/pytorch",
        ref="v2.13.0",
        path="tools/autograd/derivatives.yaml",
        line=1284,
        note="the fused RMS norm saves its input, its weight and the inverse root mean square",
    ),
)
"""Lines that decide which norm runs and which tensors it saves."""


def is_cudnn_batch_norm(
    tensor: torch.Tensor,
    weight: _Maybe,
    bias: _Maybe,
    running: tuple[_Maybe, _Maybe],
    training: bool,
) -> bool:
    """Return True if cuDNN computes a batch norm on the device."""
    if weight is None or bias is None or tensor.dim() < 3 or not tensor.numel():
        return False
    types = tensor.dtype, weight.dtype
    stated = all(one is not None for one in running)
    unstated = training and all(one is None for one in running)
    most = _MOST_TRAINED if training else _MOST_EVALUATED
    return (
        torch.backends.cudnn.enabled
        and torch.bfloat16 not in types
        and (tensor.dtype != torch.float16 or weight.dtype == torch.float32)
        and (stated or unstated)
        and tensor.shape[0] <= most
        and tensor.numel() < _MOST_ELEMENTS
    )


def batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    running: tuple[_Maybe, _Maybe],
    training: bool,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Run cuDNN's batch norm, which needs a dense input in its own memory format."""
    dense = tensor.contiguous(memory_format=suggest_memory_format(tensor))
    arguments = (dense, weight.contiguous(), bias.contiguous(), *running)
    out: torch.Tensor = _aten.cudnn_batch_norm(*arguments, training, momentum, eps)[0]
    return out


def cudnn_batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: _Maybe,
    running_mean: _Maybe,
    running_var: _Maybe,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    """The CPU's batch norm. The size of cuDNN's reserve is not public, and counts as zero."""
    arguments = (tensor, weight, bias, running_mean, running_var, training)
    with plain_kernels():
        found = _aten.native_batch_norm(*arguments, exponential_average_factor, epsilon)
    return *found, tensor.new_empty(0, dtype=torch.uint8)


def cudnn_batch_norm_backward(
    tensor: torch.Tensor,
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    running_mean: _Maybe,
    running_var: _Maybe,
    save_mean: _Maybe,
    save_var: _Maybe,
    epsilon: float,
    reserve: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The gradients of `cudnn_batch_norm` in training: always all three."""
    arguments = (grad_output, tensor, weight, running_mean, running_var, save_mean, save_var)
    with plain_kernels():
        found: tuple[torch.Tensor, ...] = _aten.native_batch_norm_backward(
            *arguments, True, epsilon, [True, True, True]
        )
    return found


def fused_rms_norm(
    tensor: torch.Tensor, normalized_shape: list[int], weight: _Maybe, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The RMS norm of the CPU's composite, and the inverse root mean square in its compute type."""
    func = _aten._fused_rms_norm.default
    with plain_kernels():
        return func._op_dk(  # type: ignore[no-any-return]
            DispatchKey.CompositeImplicitAutograd, tensor, normalized_shape, weight, eps
        )


def fused_rms_norm_backward(
    grad_out: torch.Tensor,
    tensor: torch.Tensor,
    normalized_shape: list[int],
    rstd: torch.Tensor,
    weight: _Maybe,
    output_mask: list[bool],
) -> tuple[_Maybe, _Maybe]:
    """The gradients of `fused_rms_norm`, by the CPU's autograd through its composite."""
    with plain_kernels(grad=True):
        source = tensor.detach().requires_grad_()
        scale = None if weight is None else weight.detach().requires_grad_()
        out = _normalized(source, len(normalized_shape), rstd, scale)
        inputs = [source] if scale is None else [source, scale]
        found = [*torch.autograd.grad(out, inputs, grad_out), None]
    return (found[0] if output_mask[0] else None, found[1] if output_mask[1] else None)


def _normalized(source: torch.Tensor, dims: int, rstd: torch.Tensor, scale: _Maybe) -> torch.Tensor:
    """Compose the RMS norm. `rstd` replaces the eps, which backward does not get."""
    wide = source.to(rstd.dtype)
    square = torch.pow(wide, 2).mean([wide.dim() - at - 1 for at in range(dims)], keepdim=True)
    inverse = torch.rsqrt(square.add_(math.ulp(0)))
    inverse.data.copy_(rstd)
    result = wide.mul(inverse)
    return (result if scale is None else result.mul(scale)).contiguous().type_as(source)


KERNELS: dict[str, Any] = {
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "_fused_rms_norm": fused_rms_norm,
    "_fused_rms_norm_backward": fused_rms_norm_backward,
}
"""Kernels for the CPU of norms that torch has only for CUDA."""
