"""`RelativeAttention` takes the place of the published module."""

import pytest
import torch
from torch import nn

from attention.deit import both
from torchtrim.attention import RelativeAttention, get_rpe_config, module
from torchtrim.attention.irpe import RPEConfigs
from torchtrim.errors import Unsupported, UsageError


def test_a_deit_small_loads_strictly_and_gives_the_same_logits() -> None:
    theirs, ours = both(size=224, patch=16, dim=384, depth=12, heads=6, classes=1000)
    keys = theirs.state_dict()
    assert keys["blocks.3.attn.rpe_k.lookup_table_weight"].shape == (1, 64, 50)
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.allclose(ours(images), theirs(images), atol=2e-5)


def test_the_loss_of_a_training_follows_the_reference() -> None:
    theirs, ours = both(size=16, patch=4, dim=32, depth=1, heads=2, classes=4)
    optimizers = [torch.optim.AdamW(one.parameters(), 3e-3) for one in (theirs, ours)]
    generator = torch.Generator().manual_seed(0)
    losses: list[list[float]] = [[], []]
    for _ in range(200):
        kinds = torch.randint(4, (8,), generator=generator)
        images = torch.randn(8, 3, 16, 16, generator=generator)
        for image, kind in zip(images, kinds.tolist(), strict=True):
            image[:, kind // 2 * 8 :, kind % 2 * 8 :][:, :8, :8] += 1.0
        for number, (one, optimizer) in enumerate(zip((theirs, ours), optimizers, strict=True)):
            loss = nn.functional.cross_entropy(one(images), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[number].append(loss.item())
    expected, found = map(torch.tensor, losses)
    assert expected[-20:].mean() < 0.5 * expected[:20].mean()
    assert (found[:50] - expected[:50]).abs().max() < 1e-2
    assert abs(found[-50:].mean() - expected[-50:].mean()) < 0.05


def written_out(one: RelativeAttention, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    q, k, v = one.qkv(x).unflatten(-1, (3, one.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scores = (q * one.scale) @ k.mT
    if one.rpe_k is not None:
        scores = scores + one.rpe_k(q * one.scale, height, width)
    if one.rpe_q is not None:
        scores = scores + one.rpe_q(k * one.scale, height, width).transpose(2, 3)
    weights = scores.softmax(-1)
    out = weights @ v
    if one.rpe_v is not None:
        out = out + one.rpe_v(weights, height, width)
    return one.proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("method", ["product", "cross", "euc", "quant"])
@pytest.mark.parametrize(
    ("mode", "rpe_on"), [("ctx", "qkv"), ("ctx", "q"), ("bias", "qk"), ("bias", "q")]
)
@pytest.mark.parametrize("shared", [True, False])
def test_it_does_what_its_encodings_say(method: str, mode: str, rpe_on: str, shared: bool) -> None:
    torch.manual_seed(0)
    config = get_rpe_config(1.9, method, mode, shared, 2, rpe_on)
    one = RelativeAttention(16, 2, rpe_config=config)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_()
    x = torch.randn(2, 2 + 12, 16)
    found = one(x, 3, 4)
    assert torch.allclose(found, written_out(one, x, 3, 4), atol=1e-3, rtol=1e-4)


def test_without_encodings_it_is_plain_attention() -> None:
    one = RelativeAttention(16, 2).eval()
    assert one(torch.randn(1, 9, 16)).shape == (1, 9, 16)
    assert list(one.state_dict()) == ["qkv.weight", "proj.weight", "proj.bias"]


def test_dropout_only_while_training() -> None:
    one = RelativeAttention(16, 2, attn_drop=0.5, rpe_config=get_rpe_config())
    x = torch.randn(1, 9, 16)
    assert not torch.equal(one(x), one(x))
    assert torch.equal(one.eval()(x), one(x))


def test_it_compiles_and_exports() -> None:
    one = RelativeAttention(16, 2, rpe_config=get_rpe_config(skip=1, rpe_on="qkv")).eval()
    x = torch.randn(2, 10, 16)
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), one(x), atol=1e-5)
    exported = torch.export.export(one, (x,))
    assert torch.allclose(exported.module()(x), one(x), atol=1e-5)


def test_a_grid_that_cannot_be_is_refused() -> None:
    one = RelativeAttention(16, 2, rpe_config=get_rpe_config(skip=1))
    with pytest.raises(UsageError, match="Pass the height and width"):
        one(torch.randn(1, 26 + 1, 16))
    with pytest.raises(UsageError, match="cannot be divided"):
        RelativeAttention(10, 3)


def test_encodings_of_different_kinds_are_refused() -> None:
    product, cross = (
        get_rpe_config(method=name, rpe_on="k").rpe_k for name in ("product", "cross")
    )
    config = RPEConfigs(rpe_q=product, rpe_k=cross, rpe_v=None)
    with pytest.raises(Unsupported, match="the same configuration"):
        RelativeAttention(16, 2, rpe_config=config)(torch.randn(1, 9, 16))


def test_a_mirrored_bias_is_that_of_the_other_direction() -> None:
    from torchtrim.attention import Buckets

    for method in ("product", "euclidean", "quantization"):
        buckets = Buckets.of_ratio(method, 5, 9, skip=1)
        table = torch.randn(2, buckets.number)
        turned = module.mirrored(table, buckets)
        assert isinstance(turned, torch.Tensor)
        ids = buckets.ids()
        assert torch.equal(turned[:, ids], table[:, ids.T])
