"""Attention whose positions are of another kind than any that is replaced, by what its modules hold."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Other(NamedTuple):
    """A kind of positions, what a module of it holds (one of `holds`), and why it is not replaced."""

    name: str
    holds: tuple[str, ...]
    why: str


_OTHERS = (
    Other(
        "LeViT",
        ("attention_biases", "attention_bias_cache"),
        "its bias is by the distance of rows and of columns whatever the sign, and its layers normalize "
        "queries, keys and values over the batch",
    ),
    Other(
        "Swin V2",
        ("cpb_mlp", "continuous_position_bias_mlp", "logit_scale"),
        "its bias comes from a small network, and its scores are cosines with a learnt scale",
    ),
    Other(
        "DeBERTa",
        ("pos_att_type", "pos_key_proj", "pos_query_proj", "pos_proj", "pos_q_proj"),
        "its scores compare contents with projected positions, both ways",
    ),
    Other(
        "Transformer-XL",
        ("r_net", "r_r_bias", "linear_pos", "pos_bias_u"),
        "its scores compare queries, with a bias of their own, with projected sines of distances",
    ),
    Other(
        "MaxViT and CoAtNet",
        ("rel_pos",),
        "its bias is in a module of its own, over images that are cut into blocks or grids outside of it",
    ),
    Other(
        "iRPE in DETR",
        ("rpe_q", "rpe_k", "rpe_v"),
        "its queries, keys and values are made by one parameter, from inputs that differ",
    ),
)


def other(module: nn.Module) -> Other | None:
    """What kind of positions a module has that no replacement knows; None where it shows none."""
    return next(
        (one for one in _OTHERS if any(getattr(module, n, None) is not None for n in one.holds)),
        None,
    )
