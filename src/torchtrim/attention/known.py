"""Recognizes attention modules of other libraries, and computes them with `relative_attention`.

A module is recognized by its attributes: the layers for queries, keys and values, and one kind of table.
`replace.py` verifies that its forward computes what the attributes suggest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrim.attention.adapters import (
    autoformer_attention,
    decomposed_attention,
    t5_attention,
    window_bias_attention,
)
from torchtrim.attention.buckets import Buckets, Coefficients
from torchtrim.attention.irpe import METHOD
from torchtrim.attention.module import Encodings, EncodingTable, attention_with_encodings
from torchtrim.attention.relative import Table

Size = tuple[int, int]


class WindowPartition(NamedTuple):
    """The windows of images, (B n, height width, C), and how to merge them.

    `mask` (n, L, L) is True if two tokens were neighbours before the shift, None without a shift; then the
    sizes of the padded image and of a window, and the shift.
    """

    windows: Tensor
    mask: Tensor | None
    padded: Size
    window: Size
    shift: Size


def partition_windows(x: Tensor, window: Size, shift: Size) -> WindowPartition:
    """Pad images (B, H, W, C) to whole windows, roll them by the shift, and cut them into windows.

    An axis is not shifted if one window covers it.
    """
    right, down = -x.shape[2] % window[1], -x.shape[1] % window[0]
    x = F.pad(x, (0, 0, 0, right, 0, down))
    padded = (x.shape[1], x.shape[2])
    rows, columns = (
        0 if size >= whole else by for size, whole, by in zip(window, padded, shift, strict=True)
    )
    shifted, mask = (rows, columns), None
    if any(shifted):
        x = x.roll((-rows, -columns), (1, 2))
        mask = _mask(padded, window, shifted, x.device)
    return WindowPartition(_cut(x, window), mask, padded, window, shifted)


def merge_windows(windows: Tensor, parts: WindowPartition, shape: torch.Size) -> Tensor:
    """Merge windows into images of the given shape (B, H, W, C)."""
    (height, width), (rows, columns) = parts.window, parts.padded
    x = windows.view(-1, rows // height, columns // width, height, width, windows.shape[-1])
    x = x.transpose(2, 3).reshape(-1, rows, columns, windows.shape[-1])
    if any(parts.shift):
        x = x.roll(parts.shift, (1, 2))
    return x[:, : shape[1], : shape[2]].contiguous()


def _cut(x: Tensor, window: Size) -> Tensor:
    (height, width), (batch, rows, columns, _) = window, x.shape
    x = x.reshape(batch, rows // height, height, columns // width, width, -1)
    return x.transpose(2, 3).reshape(-1, height * width, x.shape[-1])


def _mask(padded: Size, window: Size, shift: Size, device: torch.device) -> Tensor:
    bands = [
        (torch.arange(size, device=device) >= size - one).long()
        + (torch.arange(size, device=device) >= size - by)
        if by
        else torch.zeros(size, dtype=torch.long, device=device)
        for size, one, by in zip(padded, window, shift, strict=True)
    ]
    region = bands[0][:, None] * 3 + bands[1]
    tokens = _cut(region[None, :, :, None], window)[..., 0]
    return tokens[:, :, None] == tokens[:, None, :]


MASKS = ("mask", "attn_mask", "attention_mask")
_PROJECTIONS = (
    ("qkv",),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
)
_LAST = ("proj", "o_proj", "out_proj", "o")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_DROPOUT = ("attn_drop", "attn_dropout", "attention_dropout", "dropout", "drop")
_MOST_PLACES = 16
"""Arbitrary; the trial runs in float64, and 16 x 16 tokens exercise every part of a table."""


class AttentionCall(NamedTuple):
    """The arguments of a call: tokens (B, L, C) or an image (B, height, width, C), a mask, and T5's bias."""

    x: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None


class AttentionKind(NamedTuple):
    """A kind of attention with positions.

    `attend` computes the forward's output, without further results. `fits` checks an input, and `shape`
    returns the shape of a trial input. `mask`: one per window (n, L, L), or broadcastable to (B, H, L, L).
    """

    name: str
    attend: Callable[[nn.Module, AttentionCall], Tensor]
    shape: Callable[[nn.Module], tuple[int, ...]]
    fits: Callable[[nn.Module, Tensor], bool]
    mask: Literal["", "window", "broadcast"] = ""
    shares_bias: bool = False

    def heads(self, module: nn.Module) -> int:
        """Return the number of heads of a module."""
        return int(_first(module, _HEADS))

    def mask_shape(self, x: Tensor) -> tuple[int, ...] | None:
        """Return the shape of a trial mask for an input, or None."""
        windows, pairs = (2, x.shape[1], x.shape[1]), (len(x), 1, 1, x.shape[1])
        return {"window": windows, "broadcast": pairs}.get(self.mask)

    def fits_mask(self, x: Tensor, mask: Any) -> bool:
        """Return True if the mask fits the input."""
        if not isinstance(mask, Tensor) or mask.requires_grad:
            return False
        if self.mask == "window":
            return mask.dim() == 3 and len(x) % max(len(mask), 1) == 0
        sizes = (x.shape[1], x.shape[1])
        return mask.dim() == 4 and all(
            a in (1, b) for a, b in zip(mask.shape[2:], sizes, strict=True)
        )


def kind_of(module: nn.Module) -> AttentionKind | None:
    """Return the kind of attention of a module, or None if it is not recognized."""
    if not isinstance(_first(module, _HEADS), int) or not _layers(module):
        return None
    if any(_encoding_table(getattr(module, f"rpe_{one}", None)) is not None for one in "qkv"):
        return _IRPE
    if _window_table(module) is not None:
        return _SHIFTED if hasattr(module, "shift_size") else _WINDOW
    if all(isinstance(getattr(module, f"rel_pos_{axis}", None), Tensor) for axis in "hw"):
        return _DECOMPOSED
    if _pair(module, "rel_pos_embed_k") or _pair(module, "rel_pos_embed_v"):
        return _AUTOFORMER
    if hasattr(module, "relative_attention_num_buckets"):
        return _T5
    return None


def dropout_of(module: nn.Module) -> float:
    """Return the dropout probability of a module's attention, by its attributes."""
    found = _first(module, _DROPOUT)
    return float(found.p if isinstance(found, nn.Dropout) else found or 0.0)


def features_of(module: nn.Module) -> int:
    """Return the number of features of a token."""
    return int(_layers(module)[0].in_features)


def _first(module: nn.Module, names: tuple[str, ...]) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _layers(module: nn.Module) -> tuple[Any, ...]:
    for names in _PROJECTIONS:
        layers = tuple(getattr(module, name, None) for name in names)
        if all(hasattr(layer, "in_features") for layer in layers):
            return layers
    return ()


def _heads_of(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project tokens (B, L, C) to q, k, v (B, H, L, D)."""
    heads, layers = int(_first(module, _HEADS)), _layers(module)
    if len(layers) > 1:
        q, k, v = (one(x).unflatten(-1, (heads, -1)).transpose(1, 2) for one in layers)
        return q, k, v
    queries, values = getattr(module, "q_bias", None), getattr(module, "v_bias", None)
    if queries is None or values is None:
        packed = layers[0](x)
    else:
        bias = torch.cat([queries, torch.zeros_like(values), values])
        packed = F.linear(x, layers[0].weight, bias)
    q, k, v = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _scale_of(module: nn.Module) -> float | None:
    found = _first(module, ("scale", "scaling"))
    return None if found is None else float(found)


def _merged(module: nn.Module, out: Tensor) -> Tensor:
    """Merge heads (B, H, L, D) to (B, L, C), and apply the last layer."""
    tokens = out.transpose(1, 2).flatten(2)
    last = _first(module, _LAST)
    for layer in (last, getattr(module, "proj_drop", None)):
        tokens = tokens if layer is None else layer(tokens)
    return tokens


def _irpe(module: nn.Module, asked: AttentionCall) -> Tensor:
    q, k, v = _heads_of(module, asked.x)
    found = Encodings(*(_encoding_of(getattr(module, f"rpe_{letter}", None)) for letter in "qkv"))
    buckets = found.given[0].buckets(q.shape[2])
    fitting = (one and _without_skip(one, buckets.skip, i == 2) for i, one in enumerate(found))
    out = attention_with_encodings(q, k, v, Encodings(*fitting), buckets, scale=_scale_of(module))
    return _merged(module, out)


def _encoding_of(encoding: Any) -> EncodingTable | None:
    table = _encoding_table(encoding)
    if table is None:
        return None
    one = getattr(encoding, "rp_rows", encoding)
    config = one.rpe_config
    mode = "bias" if hasattr(one, "lookup_table_bias") else "contextual"
    method = METHOD.CROSS if one is not encoding else int(one.method)
    return EncodingTable(mode, method, Coefficients(config.alpha, config.beta, config.gamma), table)


def _encoding_table(encoding: Any) -> Table:
    if hasattr(encoding, "rp_rows") and hasattr(encoding, "rp_cols"):
        rows, columns = (_encoding_table(one) for one in (encoding.rp_rows, encoding.rp_cols))
        if isinstance(rows, Tensor) and isinstance(columns, Tensor):
            return rows, columns
        return None
    if not hasattr(encoding, "rpe_config"):
        return None
    found = _first(encoding, ("lookup_table_weight", "lookup_table_bias"))
    return found if isinstance(found, Tensor) else None


def _without_skip(one: EncodingTable, skip: int, on_values: bool) -> EncodingTable:
    """Remove the bucket of skip tokens from an encoding for an input without them."""
    if skip or not _has_extra(one):
        return one
    dim = -2 if on_values else -1
    tables = one.table if isinstance(one.table, tuple) else (one.table,)
    cut = tuple(t.narrow(dim, 0, t.shape[dim] - 1) for t in tables if t is not None)
    return one._replace(table=cut if len(cut) == 2 else cut[0])


def _has_extra(one: EncodingTable) -> bool:
    side = 2 * int(one.coefficients.beta) + 1
    table = one.table[0] if isinstance(one.table, tuple) else one.table
    assert table is not None
    number = side * side if one.method == METHOD.PRODUCT else side
    return number + 1 in table.shape[-2:] and number not in table.shape[-2:]


def _irpe_shape(module: nn.Module) -> tuple[int, ...]:
    found = (_encoding_of(getattr(module, f"rpe_{letter}", None)) for letter in "qkv")
    return 2, 25 + max(_has_extra(one) for one in found if one), features_of(module)


def _window_table(module: nn.Module) -> Tensor | None:
    holder = getattr(module, "relative_position_bias", module)
    holder = holder if isinstance(holder, nn.Module) else module
    found = getattr(holder, "relative_position_bias_table", None)
    return found if isinstance(found, Tensor) and found.dim() == 2 else None


def _window_size(module: Any) -> tuple[int, int]:
    found = getattr(module, "window_size", None)
    found = module.relative_position_bias.window_size if found is None else found
    if isinstance(found, int):
        return found, found
    height, width = found
    return int(height), int(width)


def _window(module: nn.Module, asked: AttentionCall) -> Tensor:
    (q, k, v), table = _heads_of(module, asked.x), _window_table(module)
    assert table is not None
    height, width = _window_size(module)
    mask = asked.mask
    if mask is not None:
        mask = mask[:, None].repeat(len(q) // len(mask), 1, 1, 1)
    scale = _scale_of(module)
    out = window_bias_attention(q, k, v, table, height=height, width=width, mask=mask, scale=scale)
    return _merged(module, out)


def _window_shape(module: nn.Module) -> tuple[int, ...]:
    (height, width), table = _window_size(module), _window_table(module)
    assert table is not None
    with_class = len(table) == (2 * height - 1) * (2 * width - 1) + 3
    return 4, height * width + with_class, features_of(module)


def _shifted(module: Any, asked: AttentionCall) -> Tensor:
    """Attend like torchvision's Swin, which cuts images into windows itself."""
    size, shift = _window_size(module), tuple(map(int, module.shift_size))
    parts = partition_windows(asked.x, size, (shift[0], shift[1]))
    out = _window(module, AttentionCall(parts.windows, parts.mask))
    return merge_windows(out, parts, asked.x.shape)


def _shifted_shape(module: nn.Module) -> tuple[int, ...]:
    height, width = _window_size(module)
    return 2, 2 * height + 1, 2 * width + 1, features_of(module)


def _decomposed(module: nn.Module, asked: AttentionCall) -> Tensor:
    batch, height, width, dim = asked.x.shape
    q, k, v = _heads_of(module, asked.x.reshape(batch, height * width, dim))
    rows, columns = (getattr(module, f"rel_pos_{axis}") for axis in "hw")
    scale = _scale_of(module)
    out = decomposed_attention(q, k, v, rows, columns, height=height, width=width, scale=scale)
    return _merged(module, out).view(batch, height, width, -1)


def _decomposed_shape(module: nn.Module) -> tuple[int, ...]:
    rows, columns = (len(getattr(module, f"rel_pos_{axis}")) // 2 + 1 for axis in "hw")
    return 2, min(rows, _MOST_PLACES), min(columns, _MOST_PLACES), features_of(module)


def _pair(module: nn.Module, name: str) -> tuple[Tensor, Tensor] | None:
    holder = getattr(module, name, None)
    rows, columns = (getattr(holder, f"embeddings_table_{axis}", None) for axis in "vh")
    if isinstance(rows, Tensor) and isinstance(columns, Tensor):
        return rows, columns
    return None


def _autoformer(module: nn.Module, asked: AttentionCall) -> Tensor:
    q, k, v = _heads_of(module, asked.x)
    side = math.isqrt(q.shape[2] - 1)
    keys, values = (_pair(module, f"rel_pos_embed_{letter}") for letter in "kv")
    scale = _scale_of(module)
    out = autoformer_attention(
        q, k, v, height=side, width=side, keys=keys, values=values, scale=scale
    )
    return _merged(module, out)


def written_out_bias(module: nn.Module, weight: Tensor, length: int) -> Tensor:
    """Return T5's bias as its layers pass it on, (1, H, L, L)."""
    ids = Buckets("product", 1, length, 0, "t5", _t5_parameters(module, weight)).ids()
    return weight[ids.to(weight.device)].permute(2, 0, 1)[None]


def _t5_parameters(module: Any, weight: Tensor) -> tuple[float, ...]:
    both_ways = not getattr(module, "is_decoder", False)
    return len(weight), int(module.relative_attention_max_distance), both_ways


def _t5(module: Any, asked: AttentionCall) -> Tensor:
    q, k, v = _heads_of(module, asked.x)
    weight = module.relative_attention_bias.weight if asked.bias is None else asked.bias
    _, furthest, both_ways = _t5_parameters(module, weight)
    both, most = bool(both_ways), int(furthest)
    out = t5_attention(q, k, v, weight, bidirectional=both, max_distance=most, mask=asked.mask)
    return _merged(module, out)


def _irpe_fits(module: nn.Module, x: Tensor) -> bool:
    skips = x.dim() == 3 and x.shape[1] > math.isqrt(x.shape[1]) ** 2
    found = (_encoding_of(getattr(module, f"rpe_{letter}", None)) for letter in "qkv")
    return x.dim() == 3 and all(_has_extra(one) for one in found if one and skips)


def _window_fits(module: nn.Module, x: Tensor) -> bool:
    return x.dim() == 3 and x.shape[1] == _window_shape(module)[1]


def _decomposed_fits(module: nn.Module, x: Tensor) -> bool:
    rows, columns = (len(getattr(module, f"rel_pos_{axis}")) for axis in "hw")
    return x.dim() == 4 and (rows, columns) == (2 * x.shape[1] - 1, 2 * x.shape[2] - 1)


def _autoformer_fits(module: nn.Module, x: Tensor) -> bool:
    return x.dim() == 3 and x.shape[1] == math.isqrt(x.shape[1] - 1) ** 2 + 1


_IRPE = AttentionKind("iRPE", _irpe, _irpe_shape, _irpe_fits)
_WINDOW = AttentionKind("Swin and BEiT", _window, _window_shape, _window_fits, "window")
_SHIFTED = AttentionKind("Swin", _shifted, _shifted_shape, lambda _, x: x.dim() == 4)
_DECOMPOSED = AttentionKind("SAM and ViTDet", _decomposed, _decomposed_shape, _decomposed_fits)
_AUTOFORMER = AttentionKind(
    "AutoFormer", _autoformer, lambda module: (2, 26, features_of(module)), _autoformer_fits
)
_T5 = AttentionKind(
    "T5",
    _t5,
    lambda module: (2, 150, features_of(module)),
    lambda _, x: x.dim() == 3,
    "broadcast",
    shares_bias=True,
)
