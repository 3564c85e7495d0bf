"""Adapters for the relative positions of other models, which reduce to the same operator.

All take q, k, v (B, H, L, D) and parameters in the layout of those models, and return (B, H, L, D).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrim.attention.buckets import Buckets
from torchtrim.attention.relative import relative_attention
from torchtrim.errors import UsageError

Pair = tuple[Tensor, Tensor]


def autoformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    height: int,
    width: int,
    keys: Pair | None = None,
    values: Pair | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attend with AutoFormer's `RelativePosition2D` on keys and values, after one class token.

    A pair is (embeddings_table_v, embeddings_table_h), each (2 furthest + 2, D), starting with the row of
    the class token. Chen et al., "AutoFormer", ICCV 2021.
    """
    given = keys or values
    if given is None:
        raise UsageError("Neither keys nor values have tables. Pass at least one pair.")
    furthest = len(given[0]) // 2 - 1
    buckets = Buckets("cross", height, width, 1, "clip", (furthest,))
    of_keys, of_values = (
        pair and (_from_query(pair[0]), _from_query(pair[1])) for pair in (keys, values)
    )
    return relative_attention(
        q,
        k,
        v,
        buckets=buckets,
        k_table=of_keys and (of_keys[0].mT, of_keys[1].mT),
        v_table=of_values,
        scale=scale,
        dropout_p=dropout_p,
    )


def decomposed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    *,
    height: int,
    width: int,
    scale: float | None = None,
) -> Tensor:
    """Attend with the decomposed positions of SAM and ViTDet: tables (2 height - 1, D), (2 width - 1, D).

    As in those models, tables of other sizes are interpolated, and positions multiply the unscaled query.
    Li et al., "Exploring Plain Vision Transformer Backbones for Object Detection", ECCV 2022.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sized = ((rel_pos_h, height), (rel_pos_w, width))
    rows, columns = (_resized(table, 2 * n - 1).mT[None] / scale for table, n in sized)
    buckets = Buckets("cross", height, width, 0, "identity", ())
    return relative_attention(q, k, v, buckets=buckets, k_table=(rows, columns), scale=scale)


def window_bias_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    *,
    height: int,
    width: int,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attend with the bias table of Swin or BEiT, ((2 height - 1)(2 width - 1) [+ 3], heads).

    The last three rows of BEiT's `relative_position_bias_table` belong to a class token in front, as query,
    as key and as both.
    """
    number = (2 * height - 1) * (2 * width - 1)
    if len(table) not in (number, number + 3):
        raise UsageError(
            f"The table has {len(table)} rows; a window of {height} x {width} needs {number}, or "
            f"{number + 3} with a class token. Pass the height and width of the window."
        )
    with_class = len(table) > number
    buckets = Buckets("product", height, width, int(with_class), "identity", (), 3)
    return relative_attention(
        q, k, v, buckets=buckets, bias=table.mT, mask=mask, scale=scale, dropout_p=dropout_p
    )


def t5_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attend with T5's `relative_attention_bias.weight`, (buckets, heads), without scaling the scores.

    Raffel et al., "Exploring the Limits of Transfer Learning", JMLR 2020.
    """
    parameters = (len(weight), max_distance, bidirectional)
    buckets = Buckets("product", 1, q.shape[2], 0, "t5", parameters)
    return relative_attention(
        q, k, v, buckets=buckets, bias=weight.mT, mask=mask, scale=1.0, dropout_p=dropout_p
    )


def _from_query(table: Tensor) -> Tensor:
    """Reorder rows from key minus query, class token first, to query minus key, class token last."""
    return torch.cat([table[1:].flip(0), table[:1]])[None]


def _resized(table: Tensor, size: int) -> Tensor:
    if len(table) == size:
        return table
    return F.interpolate(table.mT[None], size=size, mode="linear")[0].mT
