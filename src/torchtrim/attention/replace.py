"""Replaces the attention of a third-party module by `relative_attention`, after verifying the result.

A trial compares both forwards on a copy in float64, with random tables and tokens: a module that looks
familiar but computes something different is refused, not changed. The trial runs in its own thread, so that
recorders of this thread's modules and operators do not see it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtrim.attention.known import (
    MASKS,
    AttentionCall,
    AttentionKind,
    dropout_of,
    kind_of,
    written_out_bias,
)
from torchtrim.errors import Unsupported


class UnsupportedKind(NamedTuple):
    """A kind of positions that is not replaced: its name, its telltale attributes, and the reason."""

    name: str
    holds: tuple[str, ...]
    why: str


_OTHERS = (
    UnsupportedKind(
        "LeViT",
        ("attention_biases", "attention_bias_cache"),
        "its bias depends on the absolute distances of rows and columns, and its layers apply batch "
        "normalization to queries, keys and values",
    ),
    UnsupportedKind(
        "Swin V2",
        ("cpb_mlp", "continuous_position_bias_mlp", "logit_scale"),
        "its bias comes from a small network, and its scores are cosines with a learnt scale",
    ),
    UnsupportedKind(
        "DeBERTa",
        ("pos_att_type", "pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj"),
        "its scores compare contents with projected positions, in both directions",
    ),
    UnsupportedKind(
        "Transformer-XL",
        ("r_net", "r_r_bias", "linear_pos", "pos_bias_u"),
        "its scores compare queries, with a separate bias, to projected sinusoids of distances",
    ),
    UnsupportedKind(
        "MaxViT and CoAtNet",
        ("rel_pos",),
        "its bias is in a separate module, and images are cut into blocks or grids outside the attention",
    ),
    UnsupportedKind(
        "iRPE in DETR",
        ("rpe_q", "rpe_k", "rpe_v"),
        "a single parameter projects its queries, keys and values, which have different inputs",
    ),
)


def unsupported_kind(module: nn.Module) -> UnsupportedKind | None:
    """Return the unsupported kind of positions that a module has, or None."""
    return next(
        (one for one in _OTHERS if any(getattr(module, n, None) is not None for n in one.holds)),
        None,
    )


Forward = Callable[..., Any]
# The trial is in float64: different mathematics differs far more, a cast to float32 inside far less.
_CLOSE = 1e-4
_MOST_ROWS = 31  # Tables of 16 positions per side, as in known.py's trial: 2 * 16 - 1.


class ExtraOutputs(NamedTuple):
    """Results that a forward returns after its output: their number (0: it does not return a tuple), and the
    index of the bias that is passed to later layers, or -1."""

    number: int
    bias: int = -1


class Replacement(NamedTuple):
    """A new forward for one module. `wrap` takes the module's own forward, which handles other calls."""

    module: nn.Module
    kind: AttentionKind
    names: tuple[str, ...]
    beside: ExtraOutputs = ExtraOutputs(0)
    masks: bool = False

    def wrap(self, forward: Forward) -> Forward:
        """Return the forward that replaces the module's own."""

        def replaced(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(self.names, args, strict=False)), **kwargs}
            asked = self.read(given) if len(args) <= len(self.names) else None
            if asked is not None:
                return self._given(self.kind.attend(self.module, asked), asked)
            if self.follows and _is_table(given.get("position_bias")):
                length = given[self.names[0]].shape[1]
                bias = written_out_bias(self.module, given["position_bias"], length)
                return forward(**given | {"position_bias": bias})
            return forward(*args, **kwargs)

        return replaced

    def read(self, given: Mapping[str, Any]) -> AttentionCall | None:
        """Parse a call. Return None if it uses arguments that the replacement does not support."""
        x, bias = given.get(self.names[0]), given.get("position_bias") if self.follows else None
        masks = [given[name] for name in MASKS if given.get(name) is not None]
        known = (self.names[0], *MASKS, *(("position_bias",) if self.follows else ()))
        if self.module.training and dropout_of(self.module) > 0:
            return None
        if any(name not in known and not _is_nothing(value) for name, value in given.items()):
            return None
        if not isinstance(x, Tensor) or not self.kind.fits(self.module, x):
            return None
        if masks and not (self.masks and self.kind.fits_mask(x, masks[0])):
            return None
        if self.follows and not _is_table(bias):
            return None
        return AttentionCall(x, masks[0] if masks else None, bias)

    @property
    def follows(self) -> bool:
        """True if the module receives the bias of an earlier layer."""
        return self.kind.shares_bias and not hasattr(self.module, "relative_attention_bias")

    def _given(self, out: Tensor, asked: AttentionCall) -> Any:
        if not self.beside.number:
            return out
        rest: list[Any] = [None] * self.beside.number
        if self.beside.bias >= 0:
            own = getattr(self.module, "relative_attention_bias", None)
            rest[self.beside.bias] = asked.bias if own is None else own.weight
        return (out, *rest)


def replacement(module: nn.Module) -> Replacement:
    """Return a forward equal to the module's that never allocates a query x key tensor.

    Supports the attention of iRPE, Swin and BEiT (from timm, transformers and torchvision), SAM and ViTDet,
    AutoFormer, and T5. Raises `Unsupported` for other modules, and for a module that looks like one of these
    but computes something different.
    """
    kind = kind_of(module)
    if kind is None:
        name, other = type(module).__name__, unsupported_kind(module)
        raise Unsupported(
            f"{name} has the positions of {other.name}, which are not supported: {other.why}."
            if other is not None
            else f"{name} has no relative positions that torchtrim recognizes. Call "
            "torchtrim.attention.relative_attention in its forward."
        )
    found = Replacement(module, kind, tuple(inspect.signature(module.forward).parameters))
    try:
        with ThreadPoolExecutor(1, "torchtrim") as apart:
            return apart.submit(_verified, found).result()
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(
            f"{type(module).__name__} looks like attention with the positions of {kind.name}, but "
            f"the trial run failed: {type(error).__name__}: {error}"
        ) from error


@torch.no_grad()
def _verified(found: Replacement) -> Replacement:
    generator = torch.Generator().manual_seed(0)
    twin = _twin(found.module, generator)
    x = _random(found.kind.shape(twin), generator).to(next(twin.parameters()))
    one = found._replace(module=twin)
    more, bias = _trial_bias(one, x, generator)
    result = twin.forward(x, **more)
    difference = _difference(result, found.kind.attend(twin, AttentionCall(x, None, bias)))
    if difference > _CLOSE:
        raise Unsupported(
            f"{type(found.module).__name__} looks like attention with the positions of "
            f"{found.kind.name}, but does not compute the same: on random tokens the outputs differ "
            f"by {difference:.1e} of the largest. Call torchtrim.attention.relative_attention in "
            "its forward."
        )
    masks = _masks(one, x, more, bias, generator)
    return found._replace(beside=_beside(found, result, x), masks=masks)


def _twin(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a float64 copy without hooks, with random parameters and its largest tables truncated."""
    twin = copy.deepcopy(module).double().eval()
    for inner in twin.modules():
        for hooks in (inner._forward_hooks, inner._forward_pre_hooks):
            hooks.clear()
    for axis in "hw":
        table = getattr(twin, f"rel_pos_{axis}", None)
        if isinstance(table, Tensor) and len(table) > _MOST_ROWS:
            setattr(twin, f"rel_pos_{axis}", nn.Parameter(table[:_MOST_ROWS].clone()))
    for parameter in twin.parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        parameter.copy_(_random(parameter.shape, generator) * size)
    return twin


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _difference(result: Any, found: Tensor) -> float:
    expected = result[0] if isinstance(result, tuple) else result
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return float("inf")
    largest = expected.abs().max().clamp(min=1e-30)
    difference = float((found - expected).abs().max() / largest)
    return difference if difference == difference else float("inf")


def _trial_bias(
    one: Replacement, x: Tensor, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the argument with the materialized bias for a later layer of T5, and the table behind it."""
    if not one.follows:
        return {}, None
    module: Any = one.module
    number = int(module.relative_attention_num_buckets)
    weight = _random((number, one.kind.heads(one.module)), generator).to(x)
    return {"position_bias": written_out_bias(one.module, weight, x.shape[1])}, weight


def _beside(found: Replacement, result: Any, x: Tensor) -> ExtraOutputs:
    if not isinstance(result, tuple):
        return ExtraOutputs(0)
    written_out = (1, found.kind.heads(found.module), x.shape[1], x.shape[1])
    biases = (
        i
        for i, one in enumerate(result[1:])
        if isinstance(one, Tensor) and one.shape == written_out
    )
    return ExtraOutputs(len(result) - 1, next(biases, -1) if found.kind.shares_bias else -1)


def _masks(
    one: Replacement,
    x: Tensor,
    more: dict[str, Tensor],
    bias: Tensor | None,
    generator: torch.Generator,
) -> bool:
    """Return True if the module takes masks and applies them as expected."""
    name = next((name for name in MASKS if name in one.names), None)
    shape = one.kind.mask_shape(x)
    if name is None or shape is None:
        return False
    mask = (_random(shape, generator) > 0.5).to(x) * -100.0
    mask[..., 0] = 0.0
    try:
        result = one.module.forward(x, **{name: mask}, **more)
        found = one.kind.attend(one.module, AttentionCall(x, mask, bias))
    except Exception:  # a third-party forward may raise anything
        return False
    return _difference(result, found) <= _CLOSE


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, tuple | dict) and not value)


def _is_table(bias: Any) -> bool:
    return isinstance(bias, Tensor) and bias.dim() == 2
