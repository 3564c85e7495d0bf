"""Names of operators, modules and types: shortened for people, and roles common to all devices."""

from __future__ import annotations

import re
from collections.abc import Set

from torchtrim.records.profile import Profile


def base_name(operator: str) -> str:
    """Return the operator's name without its overload: `"aten::addmm.default"` -> `"aten::addmm"`."""
    return operator.partition(".")[0]


def module_paths(profile: Profile) -> Set[str]:
    """Return the paths of all modules; each starts with the root's name."""
    return {module.path for module in profile.modules}


def owner(profile: Profile, storage: int, modules: Set[str]) -> str:
    """Return the path of the module that owns a named storage, or whose operator allocated it.

    For optimizer state, return the optimizer's name. Empty if there is neither.
    """
    found = profile.storages[storage]
    if found.name:
        return _module_prefix(found.name, modules)
    return profile.module_of(found.birth) if found.birth >= 0 else ""


def top_levels(path: str, levels: int = 2) -> str:
    """Return the first levels of a path: `"net.encoder.layers.3"` -> `"net.encoder"`."""
    return ".".join(path.split(".")[:levels])


def _module_prefix(name: str, modules: Set[str]) -> str:
    """Return the longest module path that is a prefix of the name, else the name's first component.

    The name of an optimizer state starts with its optimizer, `"AdamW.0.exp_avg"`: no module path matches.
    """
    parts = name.split(".")[:-1]
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        if path in modules:
            return path
    return parts[0] if parts else ""


_KERNELS = {
    "scaled_dot_product_attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "convolution": ("mkldnn_convolution", "cudnn_convolution", "miopen_convolution"),
    "batch_norm": (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update", "batch_norm_with_update"),
    ),
    "layer_norm": ("native_layer_norm",),
    "group_norm": ("native_group_norm",),
    "rms_norm": ("_fused_rms_norm",),
    "rnn": (
        *("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    ),
    "softmax": ("_softmax", "_safe_softmax"),
    "log_softmax": ("_log_softmax",),
    "dropout": ("native_dropout",),
    "ctc_loss": ("_ctc_loss", "_cudnn_ctc_loss"),
    "grid_sampler": ("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler"),
    "affine_grid": ("affine_grid_generator", "cudnn_affine_grid_generator"),
}
_ROLES = {kernel: role for role, kernels in _KERNELS.items() for kernel in kernels}
_NAMED = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, _ROLES))})(?!\w)")


def role_of(operator: str) -> str:
    """Return the role of an ATen operator, or its own name if no other kernel has the same role.

    The role of `"native_batch_norm"` and `"cudnn_batch_norm"` is `"batch_norm"`.
    """
    return _ROLES.get(operator, operator)


def kernels_of(role: str) -> frozenset[str]:
    """Return the ATen operators of a role that has several."""
    return frozenset(_KERNELS[role])


def with_roles(place: str) -> str:
    """Replace kernels by roles in a place, or in a pattern of places.

    Plans of schema 1 named kernels: `"Net:native_layer_norm.3"` becomes `"Net:layer_norm.3"`.
    """
    path, colon, operators = place.partition(":")
    return path + colon + _NAMED.sub(lambda found: _ROLES[found[1]], operators)


_ITEM_BYTES = {"64": 8, "32": 4, "16": 2}


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; `bool`, float8 and other types without a known width count as one."""
    if dtype.startswith("complex"):
        return int(dtype.removeprefix("complex") or 64) // 8
    return next((size for end, size in _ITEM_BYTES.items() if dtype.endswith(end)), 1)


_WORDS = {
    "matmul": ("addmm", "mm", "matmul", "linear", "mkldnn_linear"),
    "batched matmul": ("bmm", "baddbmm"),
    "convolution": ("convolution",),
    "BatchNorm": ("batch_norm",),
    "LayerNorm": ("layer_norm",),
    "GroupNorm": ("group_norm",),
    "RMSNorm": ("rms_norm",),
    "recurrent layer": ("rnn",),
    "attention": ("scaled_dot_product_attention",),
    "softmax": ("softmax",),
    "log-softmax": ("log_softmax",),
    "NLL loss": ("nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "nll_loss2d_forward"),
    "MSE loss": ("mse_loss",),
    "ReLU": ("relu", "threshold"),
    "GELU": ("gelu",),
    "SiLU": ("silu",),
    "sigmoid": ("sigmoid",),
    "tanh": ("tanh",),
    "dropout": ("native_dropout", "dropout"),
    "embedding": ("embedding",),
    "max pooling": ("max_pool2d_with_indices", "max_pool3d_with_indices"),
    "average pooling": ("avg_pool2d", "_adaptive_avg_pool2d"),
    "multiplication": ("mul",),
    "division": ("div",),
    "addition": ("add",),
    "subtraction": ("sub", "rsub"),
    "power": ("pow",),
    "mean": ("mean",),
    "sum": ("sum",),
    "copy": ("clone", "copy", "_to_copy"),
    "concatenation": ("cat",),
}
_WORD_OF = {role: word for word, roles in _WORDS.items() for role in roles}


def word_of(operator: str) -> str:
    """Return the word people use for an operator: `"aten::native_batch_norm.default"` -> `"BatchNorm"`.

    An operator without one keeps its name, without its overload.
    """
    name = base_name(operator)
    inner = name.removeprefix("aten::")
    forward = inner.partition("_backward")[0]
    role = role_of(forward)
    word = _WORD_OF.get(role) or _WORD_OF.get(role.removesuffix("_"))
    if word is None or inner == name:
        return name
    return word if forward == inner else f"backward of {word}"
