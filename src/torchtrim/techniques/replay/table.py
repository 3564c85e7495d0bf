"""The operators that may run again: each gives the same bits from the same inputs, and draws nothing."""

from __future__ import annotations

NAMESPACE = "aten::"

BATCH_NORMS = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))
"""They write running statistics when they train, which a second run must not. cuDNN's and MIOpen's have the
same arguments."""
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
    )
)
_PRODUCTS = frozenset(
    (
        *("addmm", "mm", "bmm", "baddbmm", "convolution", "mkldnn_convolution"),
        "_scaled_dot_product_flash_attention_for_cpu",
    )
)
MAKERS = NORMS | _POINTWISE | _SHAPED | _PRODUCTS
"""They allocate their result, which is the first of what they return."""

WRITERS = frozenset(
    (
        *("relu_", "leaky_relu_", "elu_", "hardtanh_", "hardswish_", "silu_", "gelu_", "sigmoid_"),
        *("tanh_", "add_", "sub_", "mul_", "div_", "masked_fill_", "clamp_"),
    )
)
"""They write the whole of their first argument."""

NOISE = "empty_like"
"""Makes what a dropout without a kernel of its own then fills with noise."""
DRAW = "bernoulli_"
"""Fills it with zeros and ones, which are kept as a bit each."""
SCALES = frozenset(("div_", "mul_"))
"""Scale it."""
