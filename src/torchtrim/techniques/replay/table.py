"""Operators that may rerun: deterministic, and without random numbers."""

from __future__ import annotations

from math import prod

from torchtrim.records.operator_names import kernels_of
from torchtrim.records.profile import Operator, is_contiguous

NAMESPACE = "aten::"

BATCH_NORMS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))
"""In training these write running statistics, which a rerun must not. cuDNN's and MIOpen's take the same
arguments.
"""
NORMS = BATCH_NORMS | {"native_layer_norm", "native_group_norm", "_fused_rms_norm"}

_POINTWISE = frozenset(
    (
        *("gelu", "silu", "relu", "tanh", "sigmoid", "leaky_relu", "elu", "hardtanh", "hardswish"),
        *("hardsigmoid", "mish", "softplus", "log_sigmoid_forward", "exp", "log", "sqrt", "rsqrt"),
        *("pow", "neg", "abs", "sin", "cos", "reciprocal", "clamp", "clamp_min", "where"),
        *("add", "sub", "mul", "div", "masked_fill", "_to_copy", "clone"),
    )
)
_SHAPED = frozenset(
    (
        *("cat", "stack", "constant_pad_nd", "reflection_pad2d", "replication_pad2d", "roll"),
        *("_softmax", "_log_softmax", "_safe_softmax", "avg_pool2d", "upsample_nearest2d"),
        *("upsample_bilinear2d", "repeat", "sum", "mean"),
        *("index", "index_select", "gather", "embedding"),
    )
)
_PRODUCTS = frozenset(
    (
        *("addmm", "mm", "bmm", "baddbmm", "convolution", "mkldnn_convolution"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
)
MAKERS = NORMS | _POINTWISE | _SHAPED | _PRODUCTS
"""Operators that allocate their result, the first value they return."""

WRITERS = frozenset(
    (
        *("relu_", "leaky_relu_", "elu_", "hardtanh_", "hardswish_", "silu_", "gelu_", "sigmoid_"),
        *("tanh_", "add_", "sub_", "mul_", "div_", "masked_fill_", "clamp_"),
    )
)
"""Operators that overwrite their first argument entirely."""

NOISE = "empty_like"
"""Allocates the noise of a dropout without a fused kernel."""
DRAW = "bernoulli_"
"""Fills the noise with zeros and ones, which are kept as bits."""
SCALES = frozenset(("div_", "mul_"))
"""Operators that scale the noise."""

_ATTENTION = kernels_of("scaled_dot_product_attention")


CONJUGATING = {
    "exp": "ExpBackward0",
    "mul": "MulBackward0",
    "mm": "MmBackward0",
    "bmm": "BmmBackward0",
}
"""Operators whose gradient is one with the conjugate of what they save, and autograd's nodes for them.

The formulas are in torch's derivatives.yaml and FunctionsManual.cpp: exp is `grad * result.conj()`, mul
`grad * other.conj()`, a product `grad.mm(mat2.t().conj())`.
"""


def may_rerun(name: str, dropout: float) -> bool:
    """Return True if a rerun of a call returns the same bits. Attention with dropout draws numbers."""
    if name not in _ATTENTION:
        return name in MAKERS or name in WRITERS or name in (NOISE, DRAW)
    return not dropout


TYPES = ("float32", "float64")
_ROWS, _CHANNELS_LAST = 0.3, 0.65
"""Time of scaling and shifting, as shares of a whole batch norm: 1.7 of 6.5 ms for 16 x 64 x 56 x 56 on an
Intel Xeon, 1.8 of 2.9 ms with channels last. Smaller inputs: 0.2 to 0.37, and 0.5 to 0.65. One element per
channel and sample, which is both layouts: 0.55 and more.
"""
_SPATIAL = (4, 5)
"""Numbers of dimensions with a channels-last format."""


def norm_share(norm: Operator, device: str) -> float:
    """Return the time to rerun a batch norm, as a share of its first run."""
    given = norm.inputs[0]
    trains = len(norm.outputs) > 1 and prod(norm.outputs[1].shape) > 0
    if device != "cpu" or given.dtype not in TYPES or not trains:
        return 1.0
    if is_contiguous(given.shape, given.strides) and prod(given.shape[2:]) > 1:
        return _ROWS
    return _CHANNELS_LAST if is_dense(given.shape, given.strides) else 1.0


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if the elements are contiguous, in row-major or channels-last order."""
    if is_contiguous(shape, strides):
        return True
    last = (0, *range(2, len(shape)), 1)
    reordered = tuple(shape[d] for d in last), tuple(strides[d] for d in last)
    return len(shape) in _SPATIAL and is_contiguous(*reordered)
