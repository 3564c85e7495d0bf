"""Emulate `torch.autocast("cuda")` by the CPU's autocast with the device's lists of operators.

The lists are those of `ATen/autocast_mode.h`; `tests/emulator/test_autocast.py` compares them.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.utils._pytree import tree_leaves, tree_map

from torchtrim.dispatch.patches import Patches
from torchtrim.emulator.composites import overload_named
from torchtrim.emulator.tags import Tags

TO_FLOAT = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"),
    *("softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    *("margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss"),
    *("multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm"),
    *("logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d"),
    *("_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"),
    *("norm.Scalar", "norm.ScalarOpt_dim"),
)
TO_FLOAT_IF_UNSAID = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *("sum", "sum.dim_IntList"),
)
# Operators in low precision on the device, but not under the CPU's own autocast.
TO_LOW = (
    *("prelu", "addmv", "addr", "mv", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
# Operators in low precision under the CPU's own autocast too.
LOW_ON_BOTH = (
    *("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding"),
    *("conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("addmm", "matmul", "mm", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm"),
    "scaled_dot_product_attention",
)
TO_WIDEST = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler"),
    *("index_put", "tensordot", "scatter_add"),
)
_HALVES = (torch.float16, torch.bfloat16)
_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU)


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _downcast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.get_autocast_dtype("cuda"))


class _Host(threading.local):
    """The script's own autocast state for the CPU, initially as in a new thread."""

    enabled = False
    dtype = torch.bfloat16


class Autocast:
    """Switches the CPU's autocast on and off with the device's."""

    def __init__(self, patches: Patches, tags: Tags) -> None:
        self._patches = patches
        self._tags = tags
        self._library: Any = None

    def install(self) -> None:
        """Intercept `torch.set_autocast_enabled` and `torch.set_autocast_dtype`."""

        host = _Host()
        host.enabled = torch.is_autocast_enabled("cpu")
        host.dtype = torch.get_autocast_dtype("cpu")

        def set_enabled(device: Any, enabled: bool | None = None) -> None:
            device, enabled = ("cuda", device) if enabled is None else (device, enabled)
            if device == "cpu":
                host.enabled = bool(enabled)
            else:
                own_enabled(device, enabled)
            follow()

        def set_dtype(device: str, dtype: torch.dtype) -> None:
            if device == "cpu":
                host.dtype = dtype
            else:
                own_dtype(device, dtype)
            follow()

        def follow() -> None:
            """Set the CPU's autocast to the device's state while that is on, else to the script's own."""
            on = own_is("cuda")
            if on or host.enabled:
                self._register()
            own_enabled("cpu", on or host.enabled)
            own_dtype("cpu", own_get("cuda") if on else host.dtype)

        def is_enabled(device: str = "cuda") -> Any:
            return host.enabled if device == "cpu" else own_is(device)

        def get_dtype(device: str) -> Any:
            return host.dtype if device == "cpu" else own_get(device)

        own_is = self._patches.replace(torch, "is_autocast_enabled", is_enabled)
        own_get = self._patches.replace(torch, "get_autocast_dtype", get_dtype)
        own_enabled = self._patches.replace(torch, "set_autocast_enabled", set_enabled)
        own_dtype = self._patches.replace(torch, "set_autocast_dtype", set_dtype)
        self._patches.replace(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)

    def _register(self) -> None:
        """Register the device's lists for the CPU's autocast, once. Undone with the patches."""
        if self._library is not None:
            return
        make: Any = torch.library.Library
        self._library = make("aten", "IMPL")
        self._patches.on_undo(self._library._destroy)
        for names, kernel in (
            (TO_FLOAT, functools.partial(self._cast, change=_upcast)),
            (TO_FLOAT_IF_UNSAID, self._in_float_if_unsaid),
            (TO_LOW, functools.partial(self._cast, change=_downcast)),
            (TO_WIDEST, self._in_widest),
        ):
            for name in names:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    func = kernel(overload_named(name))
                    self._library.impl(name, func, "AutocastCPU", allow_override=True)
        options = {"with_keyset": True, "allow_override": True}
        for name in LOW_ON_BOTH:
            func = self._where_wanted(overload_named(name))
            self._library.impl(name, func, "AutocastCPU", **options)

    def _where_wanted(self, func: Any) -> Callable[..., Any]:
        """Cast tensors on the device; cast those on the host only under the script's own CPU autocast."""
        own = torch.library.get_kernel(func, "AutocastCPU")

        def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            place = "cuda" if any(map(self._is_on_device, args)) else "cpu"
            if torch.is_autocast_enabled(place):
                if place == "cuda":
                    args = tuple(map(self._cast_in_order, args))
                return own.call_boxed(keys, *args, **kwargs)
            with _ExcludeDispatchKeyGuard(_AUTOCAST):
                return func(*args, **kwargs)

        return kernel

    def _cast_in_order(self, value: Any) -> Any:
        """Cast an activation. A GPU casts from left to right, as snapshots show; the CPU's kernel does not.

        It caches casts of parameters, so they are left to it.
        """
        if not self._is_on_device(value) or not value.is_floating_point():
            return value
        kept = value.dtype == torch.float64 or (value.requires_grad and value.is_leaf)
        return value if kept else _downcast(value)

    def _is_on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self._tags.on_device(value)

    def _in_widest(self, func: Any) -> Callable[..., Any]:
        """Run in low precision, unless a tensor has a wider dtype."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            tensors = (value for value in tree_leaves(args) if isinstance(value, torch.Tensor))
            wide = any(t.dtype == torch.float32 and self._tags.on_device(t) for t in tensors)
            dtype = torch.float32 if wide else torch.get_autocast_dtype("cuda")
            return self._cast(func, lambda tensor: tensor.to(dtype))(*args, **kwargs)

        return kernel

    def _in_float_if_unsaid(self, func: Any) -> Callable[..., Any]:
        def kernel(tensor: torch.Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
            names = [a.name for a in func._schema.arguments if not a.kwarg_only]
            at = names.index("dtype") - 1 if "dtype" in names else len(args)
            if at < len(args):
                dtype, args = args[at], (*args[:at], *args[at + 1 :])
            if dtype is None and tensor.dtype in _HALVES and self._tags.on_device(tensor):
                dtype = torch.float32
            with _ExcludeDispatchKeyGuard(_AUTOCAST):
                return func(tensor, *args, dtype=dtype, **kwargs)

        return kernel

    def _cast(
        self, func: Any, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[..., Any]:
        def cast(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            if value.dtype == torch.float64 or not self._tags.on_device(value):
                return value
            return change(value)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _ExcludeDispatchKeyGuard(_AUTOCAST):
                args, kwargs = tree_map(cast, (args, kwargs))
                return func(*args, **kwargs)

        return kernel
