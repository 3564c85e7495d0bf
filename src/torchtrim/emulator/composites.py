"""Composite operators that torch decomposes differently on GPU and CPU."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from typing import Any

import torch

from torchtrim.dispatch.calls import tell_synchronized
from torchtrim.dispatch.patches import Patches
from torchtrim.emulator.mode import Accelerator
from torchtrim.emulator.streams import current_stream

_KEYS = ("AutogradCPU", "CPU")
_FUSED = "_scaled_dot_product_efficient_attention"
_MEAN = 1  # `at::Reduction::Mean`.
_NUMBERS = itertools.count()
_STATES: dict[int, torch.Tensor] = {}  # Random states that backward passes draw from again.
_aten: Any = torch.ops.aten


class Composites:
    """Registers the GPU's versions of `dropout`, `one_hot`, attention and others."""

    def __init__(self, patches: Patches, accelerator: Accelerator) -> None:
        self._patches = patches
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
            (_FUSED, fused_attention, ("CPU",)),
            (f"{_FUSED}_backward", fused_attention_backward, ("CPU",)),
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
        fused = (
            dropout_p > 0
            and query.dim() == 4
            and not enable_gqa
            and (attn_mask is None or not attn_mask.requires_grad)
            and self._tags.on_device(query)
        )
        if not fused:
            return _as_on_cpu(
                _aten.scaled_dot_product_attention.default,
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
    """Attention with dropout by the CPU's plain kernels, without keeping the `Lq x Lk` matrices.

    Returns the output, a GPU's log-sum-exp of each row, and a placeholder for the random numbers.
    """
    number, generator = next(_NUMBERS), torch.default_generator
    seed = torch.tensor(number, device="cpu")
    _STATES[number] = generator.get_state()
    weakref.finalize(seed.untyped_storage(), _STATES.pop, number, None)
    weights, kept = _weights(query, key, attn_bias, dropout_p, is_causal, scale, generator)
    rows = -(-query.shape[-2] // 32) * 32 if compute_log_sumexp else 0
    sums = query.new_zeros((*query.shape[:-2], rows), dtype=torch.float32)
    return (weights * kept) @ value, sums, seed, torch.zeros((), dtype=torch.int64, device="cpu")


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
    """The gradients of `fused_attention`, computed in the order of the CPU's autograd."""
    generator = torch._C.Generator("cpu")
    generator.set_state(_STATES[int(philox_seed)])
    weights, kept = _weights(query, key, attn_bias, dropout_p, is_causal, scale, generator)
    factor = _root_of_scale(query, scale)
    queries, keys = _flat(query * factor), _flat(key.transpose(-2, -1) * factor)
    dropped, by_out = _flat(weights * kept), _flat(grad_out)
    by_weights = (by_out @ _flat(value).mT).view(weights.shape) * kept
    by_scores = _flat(_aten._softmax_backward_data(by_weights, weights, -1, weights.dtype))
    return (
        (by_scores @ keys.mT).view(query.shape) * factor,
        ((queries.mT @ by_scores).view(key.mT.shape) * factor).mT,
        (dropped.mT @ by_out).view(value.shape),
        None,
    )


def _flat(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's weights before dropout, and the dropout factors."""
    factor = _root_of_scale(query, scale)
    scores = (query * factor) @ (key.transpose(-2, -1) * factor)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, -math.inf)
    if bias is not None:
        scores = scores + bias
    masked = is_causal or bias is not None
    weights = _aten._safe_softmax(scores, -1) if masked else scores.softmax(-1)
    kept = torch.empty_like(weights).bernoulli_(1 - dropout_p, generator=generator)
    return weights, kept.div_(1 - dropout_p)


def _root_of_scale(query: torch.Tensor, scale: float | None) -> float:
    return math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
