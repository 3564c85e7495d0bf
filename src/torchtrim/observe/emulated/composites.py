"""Operators that torch puts together differently on a GPU than on the CPU."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from torchtrim.observe.calls import tell_synchronized
from torchtrim.observe.emulated.mode import Accelerator
from torchtrim.observe.emulated.patches import Patches
from torchtrim.observe.emulated.streams import current_stream

_KEYS = ("AutogradCPU", "CPU")
_MEAN = 1
_aten: Any = torch.ops.aten


class Composites:
    """Registers the device's form of `dropout`, `one_hot` and attention, for tensors that lie on it."""

    def __init__(self, patches: Patches, accelerator: Accelerator) -> None:
        self._patches = patches
        self._accelerator = accelerator
        self._tags = accelerator.tags

    def install(self) -> None:
        """Register; undone with the patches."""
        make: Any = torch.library.Library
        library = make("aten", "IMPL")
        self._patches.on_undo(library._destroy)
        for name, kernel, keys in (
            ("dropout", self._dropout, _KEYS),
            ("one_hot", self._one_hot, _KEYS),
            ("ctc_loss.IntList", self._ctc_loss, _KEYS),
            ("ctc_loss.Tensor", self._ctc_loss, _KEYS),
            ("cross_entropy_loss", self._cross_entropy, _KEYS),
            ("scaled_dot_product_attention", self._attention, _KEYS),
            ("_scaled_dot_product_efficient_attention", fused_attention, ("CPU",)),
            (
                "_scaled_dot_product_efficient_attention_backward",
                fused_attention_backward,
                ("CPU",),
            ),
        ):
            if len(keys) > 1:
                packet, _, overload = name.partition(".")
                func = getattr(getattr(_aten, packet), overload or "default")
                self._accelerator.composites[func] = kernel
            for key in keys:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    library.impl(name, kernel, key, allow_override=True)

    def _dropout(self, tensor: torch.Tensor, p: float, train: bool) -> Any:
        """Fused on a GPU, with a mask of one byte an element; the CPU multiplies by a mask of numbers."""
        if not train or p in (0, 1) or not tensor.numel() or not self._tags.on_device(tensor):
            return _aten.dropout.default.decompose(tensor, p, train)
        return _aten.native_dropout(tensor, p, train)[0]

    def _one_hot(self, tensor: torch.Tensor, num_classes: int = -1) -> Any:
        """The CPU looks at the values to check them; a GPU leaves that to the kernel that scatters."""
        if not self._tags.on_device(tensor) or not tensor.numel():
            return _aten.one_hot.default.decompose(tensor, num_classes)
        if num_classes < 0:
            num_classes = int(tensor.max().item()) + 1
        shape = (*tensor.shape, num_classes)
        zeros = torch.zeros(shape, dtype=torch.int64, device=tensor.device)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    def _cross_entropy(
        self,
        scores: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Any:
        """Under a dispatch mode torch does not select the targets that count, which waits."""
        mean = reduction == 1 and weight is not None and label_smoothing > 0
        if mean and target.dtype == torch.int64 and self._tags.on_device(scores):
            tell_synchronized("smoothed-weights", current_stream())
        return _aten.cross_entropy_loss.default.decompose(
            scores, target, weight, reduction, ignore_index, label_smoothing
        )

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
        """The mean divides by the lengths of the targets, which C++ uploads where no mode sees it."""
        packet = _aten.ctc_loss
        plain = (packet.IntList if isinstance(target_lengths, list) else packet.Tensor).decompose
        given = (log_probs, targets, input_lengths, target_lengths, blank)
        if reduction != _MEAN or not self._tags.on_device(log_probs):
            return plain(*given, reduction, zero_infinity)
        each = plain(*given, 0, zero_infinity)
        return (each / torch.as_tensor(target_lengths, device=each.device).clamp_min(1)).mean()

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
        """With dropout the CPU has no fused kernel, and a GPU has."""
        fused = (
            dropout_p > 0
            and query.dim() == 4
            and not enable_gqa
            and (attn_mask is None or not attn_mask.requires_grad)
            and self._tags.on_device(query)
        )
        if not fused:
            return _aten.scaled_dot_product_attention.default.decompose(
                *(query, key, value, attn_mask, dropout_p, is_causal),
                scale=scale,
                enable_gqa=enable_gqa,
            )
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -math.inf)
        if bias is not None:
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        return _aten._scaled_dot_product_efficient_attention(
            *(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal), scale=scale
        )[0]


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Attention with dropout by the CPU's plain kernels, whose matrices of `Lq x Lk` nobody keeps.

    Gives the output, what a GPU keeps of each row's sum, and the seed of the random numbers.
    """
    seed = torch.randint(2**62, ())
    weights, kept = _weights(query, key, attn_bias, dropout_p, is_causal, scale, int(seed))
    rows = -(-query.shape[-2] // 32) * 32 if compute_log_sumexp else 0
    sums = query.new_zeros((*query.shape[:-2], rows), dtype=torch.float32)
    return (weights * kept) @ value, sums, seed, torch.zeros((), dtype=torch.int64)


def fused_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `fused_attention`, from its inputs and its seed."""
    seed = int(philox_seed)
    weights, kept = _weights(query, key, attn_bias, dropout_p, is_causal, scale, seed)
    factor = _scale(query, scale)
    by_weights = (grad_out @ value.transpose(-2, -1)) * kept
    by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True))
    return (
        by_scores @ key * factor,
        by_scores.transpose(-2, -1) @ query * factor,
        (weights * kept).transpose(-2, -1) @ grad_out,
        None,
    )


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention's weights before dropout, and what dropout multiplies them by."""
    scores = query @ key.transpose(-2, -1) * _scale(query, scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores.masked_fill_(later, -math.inf)
    if bias is not None:
        scores = scores + bias
    weights = scores.softmax(-1)
    generator = torch._C.Generator("cpu")
    generator.manual_seed(seed)
    kept = torch.empty_like(weights).bernoulli_(1 - dropout_p, generator=generator)
    return weights, kept.div_(1 - dropout_p)


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
