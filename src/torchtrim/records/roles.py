"""Roles of operators: what a kernel computes, under one name for every device."""

from __future__ import annotations

import re

_KERNELS = {
    "scaled_dot_product_attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "convolution": ("mkldnn_convolution", "cudnn_convolution", "miopen_convolution"),
    "batch_norm": ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
    "layer_norm": ("native_layer_norm",),
    "group_norm": ("native_group_norm",),
    "rms_norm": ("_fused_rms_norm",),
    "rnn": ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"),
    "softmax": ("_softmax", "_safe_softmax"),
    "log_softmax": ("_log_softmax",),
}
_ROLES = {kernel: role for role, kernels in _KERNELS.items() for kernel in kernels}
_NAMED = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, _ROLES))})(?!\w)")


def role_of(operator: str) -> str:
    """Return the role of one of torch's operators, its own name where no other kernel does the same.

    `"native_batch_norm"` and `"cudnn_batch_norm"` are both `"batch_norm"`.
    """
    return _ROLES.get(operator, operator)


def with_roles(place: str) -> str:
    """Return a place, or a pattern of places, with roles in place of kernels.

    Plans of schema 1 named kernels: `"Net:native_layer_norm.3"` is `"Net:layer_norm.3"`.
    """
    path, colon, operators = place.partition(":")
    return path + colon + _NAMED.sub(lambda found: _ROLES[found[1]], operators)
