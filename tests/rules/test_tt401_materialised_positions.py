"""Written-out positions are found in what ran; plain attention never is."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from attention.cases import Case
from positions import PLAIN, SLOW, Net, PlainAttention, T5Stack, WindowAttention, tokens
from profiles import Step
from steps import train_step, trial
from torchtrim.analysis.positions import replaceable, written_positions
from torchtrim.attention import Buckets
from torchtrim.records.profile import Profile, TensorUse
from torchtrim.rules.tt401_materialised_positions import check

FORMS = {
    "irpe": ["bias", "bias", "values"],
    "irpe on keys": ["bias"],
    "irpe bias": ["bias", "bias"],
    "irpe cross": ["bias"] * 4 + ["values"] * 2,
    "irpe euclidean": ["bias", "bias", "values"],
    "irpe quantization": ["bias", "bias", "values"],
    "swin": ["bias"],
    "torchvision": ["bias"],
    "beit": ["bias"],
    "sam": ["decomposed"] * 2,
    "sam fused": ["decomposed"] * 2,
    "autoformer": ["values", "values", "vectors", "vectors"],
    "t5": ["bias"],
}


def recorded(model: nn.Module, shape: tuple[int, ...]) -> Profile:
    """The profile of a step that took no time, so that no share depends on the machine."""
    return replace(trial(train_step(model, tokens(shape)))[1], step_seconds=1e-6)


@pytest.mark.parametrize("name", SLOW)
def test_slow_forms_are_found_and_known(name: str) -> None:
    make, shape = SLOW[name]
    profile = recorded(Net(make()), shape)
    found = written_positions(profile)
    assert sorted(one.form for one in found) == FORMS[name]
    assert {profile.module_of(one.at) for one in found} == {"Net.attn"}
    assert all(
        one.first <= one.gather and one.at < one.last for one in found if one.form != "values"
    )
    assert replaceable(profile, ["Net.attn"]) == ["Net.attn"]
    findings = list(check(profile))
    assert findings
    for finding in findings:
        assert (finding.code, finding.path.endswith("tests/positions.py")) == ("TT401", True)
        assert finding.line > 0
        assert finding.price_ms is not None
        assert finding.price_ms > 0
        assert finding.fix is not None
        assert "relative_attention replaces 1 of 1 modules" in finding.fix.reason


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_attention_is_left_alone(kind: str) -> None:
    profile = recorded(Net(PlainAttention(kind)), (64, 64))
    assert not written_positions(profile)
    assert not list(check(profile))


def test_attention_on_looked_up_tokens_is_left_alone() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.places = nn.Embedding(11, 32), nn.Embedding(64, 32)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
            return (x @ x.mT).softmax(-1) @ x

    assert not written_positions(recorded(Bare(), (80, 64)))


def test_ours_writes_nothing_out() -> None:
    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.case = Case(Buckets.of_ratio("product", 8, 8))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.case.found("pure") * self.scale

    assert not written_positions(recorded(Ours(), (2, 64)))


def test_torchs_fused_attention_with_a_bias_in_inference() -> None:
    profile = fused()
    (found,) = written_positions(profile)
    assert found.form == "bias"
    assert (found.first, found.last) == (found.gather, found.at + 1)


def fused() -> Profile:
    """Torch's fused kernel, whose scores no operator shows."""
    step = Step()
    table = TensorUse(step.alive("parameter", 2000, name="net.table"), "float32", (225, 2), (2, 1))
    index = TensorUse(step.alive("buffer", 32768, name="net.index"), "int64", (4096,), (1,))
    tokens = [
        TensorUse(step.alive("input", 16384), "float32", (1, 2, 64, 32), (4096, 2048, 32, 1))
        for _ in range(3)
    ]
    with step.module("net.attn", "Attention"):
        gather = step.op("aten::index.Tensor", table, index, makes=32768, line=7)
        retype(step, gather.index, (4096, 2))
        added = TensorUse(gather.out, "float32", (1, 2, 64, 64), (8192, 1, 128, 2))
        step.op("aten::_scaled_dot_product_flash_attention_for_cpu", *tokens, added, makes=16384)
    return step.profile()


def retype(step: Step, index: int, shape: tuple[int, ...]) -> None:
    op = step.operators[index]
    use = TensorUse(op.outputs[0].storage, "float32", shape, (1,) * len(shape))
    step.operators[index] = replace(op, outputs=(use,))


def test_the_compiled_rpe_index_shows_as_an_empty_tensor_that_is_filled() -> None:
    for path, count in (("rpe_ops/rpe_index.py", 1), ("model.py", 0)):
        step = Step()
        shape = (1, 2, 50, 50)
        scores = step.op("aten::bmm", makes=20000, line=3)
        empty = step.op("aten::zeros", makes=20000, line=40, path=path)
        total = step.op("aten::add.Tensor", scores, empty, makes=20000, line=4)
        for made in (scores, empty, total):
            retype(step, made.index, shape)
        step.op("aten::_softmax", TensorUse(total.out, "float32", shape, (1, 1, 1, 1)), makes=20000)
        assert len(written_positions(step.profile())) == count


@pytest.mark.parametrize(("share", "count"), [(0.005, 0), (0.02, 1)])
def test_a_hundredth_of_the_step_is_the_border(share: float, count: int) -> None:
    profile = fused()
    gather = written_positions(profile)[0].gather
    operators = list(profile.operators)
    operators[gather] = replace(operators[gather], seconds=share)
    parameter = replace(profile.storages[0], bytes=10**9)
    storages = [parameter, *profile.storages[1:]]
    profile = replace(profile, operators=operators, storages=storages, step_seconds=1.0)
    assert len(list(check(profile))) == count


def test_on_an_emulated_device_no_time_is_claimed() -> None:
    (finding,) = check(replace(fused(), device="emulated"))
    assert finding.price_ms is None
    assert finding.source == "modelled"
    assert finding.price_bytes == 32768


def test_a_module_with_more_than_tables_gets_advice() -> None:
    class Cosine(WindowAttention):
        """Swin's second version has a learnt temperature."""

        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.ones(2, 1, 1))

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            q, k, v = self.split(x)
            q, k = (nn.functional.normalize(one, dim=-1) for one in (q, k))
            scores = q @ k.mT * self.logit_scale + self.bias()
            return self.merged(scores.softmax(-1) @ v)

    profile = recorded(Net(Cosine()), (4, 49))
    (finding,) = check(profile)
    assert finding.fix is not None
    assert finding.fix.reason.startswith("call torchtrim.attention.relative_attention")
    assert "advise(4, 2, tokens=49)" in finding.fix.reason
    assert finding.fix.reason.startswith("call torchtrim.attention.relative_attention")
    assert "Cosine is not among the modules that it replaces" in finding.fix.reason


def test_layers_that_share_a_bias_are_one_finding() -> None:
    (finding,) = check(recorded(T5Stack(), (2, 80)))
    assert "in 3 attentions" in finding.message
    assert finding.count_per_step == 1
