"""Composite operators that torch decomposes differently on GPU and CPU."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from torchtrim.dispatch.calls import tell_synchronized
from torchtrim.dispatch.patches import Patches
from torchtrim.emulator import attention, norms, recurrent
from torchtrim.emulator.kernels import AttentionCall, Target, attention_kernel
from torchtrim.emulator.mode import Accelerator
from torchtrim.emulator.recurrent import MODES
from torchtrim.emulator.streams import current_stream

_KEYS = ("AutogradCPU", "CPU")
_MEAN = 1  # `at::Reduction::Mean`.
_KERNELS: dict[str, Any] = attention.KERNELS | norms.KERNELS | recurrent.KERNELS
_aten: Any = torch.ops.aten


class Composites:
    """Registers the GPU's versions of `dropout`, `one_hot`, attention and others.

    `target`: the device whose kernels run, or None for the CPU's.
    """

    def __init__(self, patches: Patches, accelerator: Accelerator, target: Target | None) -> None:
        self._patches = patches
        self._target = target
        self._accelerator = accelerator
        self._tags = accelerator.tags

    def install(self) -> None:
        """Register the operators. Undone with the patches."""
        make: Any = torch.library.Library
        library = make("aten", "IMPL")
        self._patches.on_undo(library._destroy)
        for name, kernel, keys in (
            ("dropout", self._dropout, _KEYS),
            ("one_hot", self._one_hot, _KEYS),
            ("ctc_loss.IntList", self._ctc_loss, _KEYS),
            ("ctc_loss.Tensor", self._ctc_loss, _KEYS),
            ("cross_entropy_loss", self._cross_entropy, _KEYS),
            ("sparse_coo_tensor.indices", self._sparse, _KEYS),
            ("scaled_dot_product_attention", self._attention, _KEYS),
            ("native_dropout", fused_dropout, ("CPU",)),
            ("native_dropout_backward", fused_dropout_backward, ("CPU",)),
            ("batch_norm", self._batch_norm, _KEYS),
            *((f"{name}.input", self._recurrent(name, packed=False), _KEYS) for name in MODES),
            *((f"{name}.data", self._recurrent(name, packed=True), _KEYS) for name in MODES),
            *((name, kernel, ("CPU",)) for name, kernel in _KERNELS.items()),
        ):
            if len(keys) > 1:
                self._accelerator.composites[overload_named(name)] = kernel
            for key in keys:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    library.impl(name, kernel, key, allow_override=True)

    def _dropout(self, tensor: torch.Tensor, p: float, train: bool) -> Any:
        """Fused on a GPU, with a mask of one byte per element. The CPU's mask is floating-point."""
        if not train or p in (0, 1) or not tensor.numel() or not self._tags.on_device(tensor):
            return _as_on_cpu(_aten.dropout.default, tensor, p, train)
        return _aten.native_dropout(tensor, p, train)[0]

    def _one_hot(self, tensor: torch.Tensor, num_classes: int = -1) -> Any:
        """The CPU reads the values to check them; a GPU leaves that to the scatter kernel."""
        if not self._tags.on_device(tensor) or (num_classes <= 0 and not tensor.numel()):
            return _as_on_cpu(_aten.one_hot.default, tensor, num_classes)
        if num_classes < 0:
            num_classes = int(tensor.max().item()) + 1
        zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    def _sparse(self, indices: torch.Tensor, values: torch.Tensor, **options: Any) -> Any:
        """Without a size, the largest index of each dimension is read, which takes two copies on a GPU."""
        if self._tags.on_device(indices):
            for _ in range(2):
                tell_synchronized("sparse-size", current_stream())
        return _as_on_cpu(_aten.sparse_coo_tensor.indices, indices, values, **options)

    def _cross_entropy(
        self,
        scores: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        """Under a dispatch mode torch does not select the counted targets, which synchronizes."""
        mean = reduction == 1 and weight is not None and label_smoothing > 0
        if mean and target.dtype == torch.int64 and self._tags.on_device(scores):
            tell_synchronized("smoothed-weights", current_stream())
        arguments = (scores, target, weight, reduction, ignore_index, label_smoothing)
        return _as_on_cpu(_aten.cross_entropy_loss.default, *arguments)

    def _ctc_loss(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = _MEAN,
        zero_infinity: bool = False,
    ) -> Any:
        """The mean divides by the targets' lengths, which C++ uploads unseen by modes."""
        packet = _aten.ctc_loss
        plain = packet.IntList if isinstance(target_lengths, list) else packet.Tensor
        arguments = (log_probs, targets, input_lengths, target_lengths, blank)
        if reduction != _MEAN or not self._tags.on_device(log_probs):
            return _as_on_cpu(plain, *arguments, reduction, zero_infinity)
        each = _as_on_cpu(plain, *arguments, 0, zero_infinity)
        return (each / torch.as_tensor(target_lengths, device=each.device).clamp_min(1)).mean()

    def _batch_norm(
        self,
        tensor: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Any:
        running = running_mean, running_var
        chosen = self._target is not None and self._tags.on_device(tensor)
        if chosen and norms.is_cudnn_batch_norm(tensor, weight, bias, running, training):
            assert weight is not None
            assert bias is not None
            return norms.batch_norm(tensor, weight, bias, running, training, momentum, eps)
        arguments = (tensor, weight, bias, *running, training, momentum, eps, cudnn_enabled)
        return _as_on_cpu(_aten.batch_norm.default, *arguments)

    def _recurrent(self, name: str, *, packed: bool) -> Any:
        """Return the GPU's version of a recurrent operator, for packed sequences or others."""
        packet = getattr(_aten, name)
        func = packet.data if packed else packet.input

        def run(tensor: torch.Tensor, *args: Any) -> Any:
            chosen = self._target is not None and self._tags.on_device(tensor)
            if not (chosen and recurrent.is_cudnn_layer(tensor)):
                return _as_on_cpu(func, tensor, *args)
            sizes, (states, *rest) = (args[0].tolist(), args[1:]) if packed else (None, args)
            states = list(states) if name == "lstm" else [states]
            options = (*rest, False) if packed else tuple(rest)
            return recurrent.cudnn_layer(name, tensor, states, *options, sizes=sizes)

        return run

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        if self._target is not None and self._tags.on_device(query) and not query.is_nested:
            call = AttentionCall(*arguments, enable_gqa)
            kernel = attention_kernel(call, self._target)
            choose = torch._fused_sdp_choice
            fused = kernel != "math" or choose(*arguments, scale=scale, enable_gqa=enable_gqa)
            if fused:
                return attention.attend(kernel, call, scale)
        func = _aten.scaled_dot_product_attention.default
        return _as_on_cpu(func, *arguments, scale=scale, enable_gqa=enable_gqa)


def _as_on_cpu(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the C++ composite, since `decompose` may use a Python decomposition with other operators."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def fused_dropout(
    tensor: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout with the CPU's rounding: divides by `1 - p`, where a GPU multiplies by the inverse."""
    if train is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p)
    return tensor * mask.to(tensor.dtype).div_(1 - p), mask


def fused_dropout_backward(
    gradient: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """The gradient of `fused_dropout`; `scale` is the inverse of `1 - p`."""
    return gradient * mask.to(gradient.dtype).div_(1 / scale)


def overload_named(name: str) -> Any:
    """Return the operator `packet.overload` or `packet` of `torch.ops.aten`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")
