"""A replacement is given for what is known and was tried, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from positions import (
    SLOW,
    DecomposedAttention,
    PlainAttention,
    RPEAttention,
    T5Attention,
    WindowAttention,
)
from torchtrim.attention import replace
from torchtrim.attention.known import dropout_of, kind_of, merge_windows, partition_windows
from torchtrim.errors import Unsupported

KINDS = {
    "irpe": "iRPE",
    "swin": "Swin and BEiT",
    "torchvision": "Swin",
    "beit": "Swin and BEiT",
    "sam fused": "SAM and ViTDet",
    "autoformer": "AutoFormer",
    "t5": "T5",
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_known_by_what_it_holds(name: str) -> None:
    module = SLOW[name][0]()
    found = replace.replacement(module)
    assert found.kind.name == KINDS[name]
    assert found.masks == (name in ("swin", "t5"))
    assert found.beside == (replace.ExtraOutputs(1, 0) if name == "t5" else replace.ExtraOutputs(0))


@pytest.mark.parametrize("module", [PlainAttention(), nn.Linear(4, 4), nn.Sequential()])
def test_others_are_not_known(module: nn.Module) -> None:
    assert kind_of(module) is None
    with pytest.raises(Unsupported, match="no relative positions that torchtrim recognizes"):
        replace.replacement(module)


def test_the_trial_leaves_no_trace() -> None:
    module = RPEAttention()
    calls: list[str] = []
    for inner in (module, module.qkv):
        inner.register_forward_hook(lambda *_: calls.append("hook"))
    state = {key: value.clone() for key, value in module.state_dict().items()}
    random_state = torch.get_rng_state()
    replace.replacement(module)
    assert not calls
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert module.qkv.weight.dtype == torch.float32


@pytest.mark.parametrize("change", ["scale", "softmax", "order"])
def test_what_computes_something_else_is_refused(change: str) -> None:
    class Other(WindowAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = self.split(x)
            scores = q @ k.mT * (0.3 if change == "scale" else self.scale)
            scores = scores + (self.bias().mT if change == "order" else self.bias())
            weights = scores.sigmoid() if change == "softmax" else scores.softmax(-1)
            return self.merged(weights @ v)

    with pytest.raises(Unsupported, match="does not compute the same"):
        replace.replacement(Other())


def test_a_table_of_a_large_grid_is_tried_on_a_small_one() -> None:
    assert replace.replacement(DecomposedAttention(grid=(64, 64))).kind.shape(
        DecomposedAttention(grid=(64, 64))
    ) == (2, 16, 16, 32)


def test_calls_are_read_by_position_and_by_name() -> None:
    found = replace.replacement(WindowAttention())
    x, mask = torch.randn(4, 49, 32), torch.zeros(2, 49, 49)
    for given in ({"x": x}, {"x": x, "mask": None}, {"x": x, "mask": mask}):
        assert found.read(given) is not None
    refused = (
        {"x": x[:, :48]},
        {"x": x[0]},
        {"x": x, "mask": mask[0]},
        {"x": x, "mask": torch.zeros(3, 49, 49)},
        {"x": x, "mask": mask.clone().requires_grad_()},
        {"x": x, "more": torch.ones(1)},
        {"x": None},
        {},
    )
    assert all(found.read(given) is None for given in refused)


def test_a_later_layer_of_t5_takes_either_bias() -> None:
    torch.manual_seed(0)
    first, later = T5Attention(), T5Attention(has_bias=False)
    x = torch.randn(2, 20, 32)
    expected, full = later(x, position_bias=first.compute_bias(20))
    weight = first.relative_attention_bias.weight
    forward = replace.replacement(later).wrap(later.forward)
    assert torch.equal(forward(x, position_bias=full)[0], expected)
    found, handed_on = forward(x, position_bias=weight)
    assert torch.allclose(found, expected, atol=1e-5)
    assert handed_on is weight
    learnt = torch.zeros(2, 1, 1, 20, requires_grad=True)
    written_out = forward(x, mask=learnt, position_bias=weight)
    assert torch.allclose(written_out[0], expected, atol=1e-5)
    assert written_out[1].shape == full.shape


def test_dropout_is_seen_however_it_is_kept() -> None:
    module = PlainAttention()
    assert dropout_of(module) == 0
    module.attention_dropout = 0.25
    assert dropout_of(module) == 0.25
    module.attn_drop = nn.Dropout(0.5)
    assert dropout_of(module) == 0.5


@pytest.mark.parametrize(
    ("holds", "name"),
    [
        ("attention_biases", "LeViT"),
        ("cpb_mlp", "Swin V2"),
        ("pos_key_proj", "DeBERTa"),
        ("r_r_bias", "Transformer-XL"),
        ("rel_pos", "MaxViT and CoAtNet"),
    ],
)
def test_positions_of_another_kind_are_named(holds: str, name: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.qkv = 2, nn.Linear(8, 24)
            setattr(self, holds, nn.Parameter(torch.zeros(2, 3)))

    with pytest.raises(Unsupported, match=f"Attention has the positions of {name}, which are not"):
        replace.replacement(Attention())


@pytest.mark.parametrize("size", [(8, 10), (7, 11), (4, 5), (3, 20)])
@pytest.mark.parametrize("shift", [(0, 0), (2, 2), (1, 3)])
def test_joined_is_what_was_parted(size: tuple[int, int], shift: tuple[int, int]) -> None:
    x = torch.randn(2, *size, 3)
    parts = partition_windows(x, (4, 5), shift)
    assert parts.windows.shape[1:] == (20, 3)
    assert torch.equal(merge_windows(parts.windows, parts, x.shape), x)


def test_a_mask_parts_tokens_that_the_shift_brought_together() -> None:
    places = torch.arange(64.0).view(1, 8, 8, 1)
    parts = partition_windows(places, (4, 4), (2, 2))
    assert parts.mask is not None
    assert parts.mask.shape == (4, 16, 16)
    assert parts.mask[0].all()
    last = parts.windows[3, :, 0]
    rows, columns = last // 8, last % 8
    together = (rows[:, None] - rows).abs().lt(4) & (columns[:, None] - columns).abs().lt(4)
    assert torch.equal(parts.mask[3], together)


def test_one_window_is_not_shifted() -> None:
    parts = partition_windows(torch.randn(1, 4, 5, 2), (4, 5), (2, 2))
    assert parts.mask is None
    assert parts.shift == (0, 0)
