"""Relative attention: known modules are found, replaced, certified, and put back."""

from __future__ import annotations

import copy
import io
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from positions import (
    SLOW,
    DecomposedAttention,
    Net,
    RPEAttention,
    T5Attention,
    T5Stack,
    WindowAttention,
    tokens,
)
from steps import fitting, squared, train_step, trial
from torchtrim.analysis.positions import written_positions
from torchtrim.attention import known
from torchtrim.errors import ApplyFailed
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.techniques.relative_attention import TECHNIQUE


def planned(*where: str) -> Technique:
    return Technique(name="relative_attention", where=where, equivalence="ROUNDING")


def plan_for(*where: str) -> Plan:
    return Plan(
        torchtrim="0",
        script="",
        fingerprint={},
        budget_bytes=1,
        techniques=(planned(*where),),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
    )


def made(name: str) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    make, shape = SLOW[name]
    return Net(make()), tokens(shape)


def saved(model: nn.Module, ids: Tensor) -> int:
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        squared(model, ids)
    return sum(kept.values())


@pytest.mark.parametrize("name", SLOW)
def test_outputs_and_gradients_are_equal_up_to_rounding(name: str) -> None:
    model, ids = made(name)
    twin = copy.deepcopy(model)
    handle = TECHNIQUE.apply({"Net": model}, planned("Net.attn"))
    for one in (model, twin):
        squared(one, ids).backward()
    found, expected = (
        {key: p.grad for key, p in one.named_parameters() if p.grad is not None}
        for one in (model, twin)
    )
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert (found[key] - gradient).norm() <= 1e-4 * gradient.norm().clamp(min=1e-3), key
    assert (model(ids) - twin(ids)).abs().max() <= 1e-5
    assert not torch.equal(model(ids), twin(ids))
    handle.revert()
    assert torch.equal(model(ids), twin(ids))


@pytest.mark.parametrize("name", ["irpe", "sam", "autoformer"])
def test_less_is_kept_for_backward(name: str) -> None:
    model, ids = made(name)
    if name == "sam":
        model, ids = Net(DecomposedAttention(grid=(20, 20))), tokens((2, 20, 20))
    before = saved(model, ids)
    TECHNIQUE.apply({"Net": model}, planned("Net.attn"))
    assert saved(model, ids) < {"sam": 0.7}.get(name, 0.5) * before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["irpe", "swin", "sam fused", "t5"])
def test_a_replaced_module_is_certified(name: str) -> None:
    model, ids = made(name)
    found = fitting(train_step(model, ids), steps=3)
    original = found.observe()
    certificate = found.verify(original, plan_for("Net.attn"))
    assert certificate.verdict == "ROUNDING", certificate.reason
    assert 0 < certificate.largest_difference < 1e-3
    planned_trial = found.run_planned(plan_for("Net.attn"))
    assert planned_trial.profile is not None
    assert not written_positions(planned_trial.profile)


@pytest.mark.slow
def test_a_wrong_replacement_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made("swin")
    found = fitting(train_step(model, ids), steps=3)
    original = found.observe()

    def turned(module: nn.Module, asked: known.AttentionCall) -> Tensor:
        return known._window(module, asked).flip(1)

    kind = known._WINDOW._replace(attend=turned)
    monkeypatch.setattr(known, "_WINDOW", kind)
    with pytest.raises(ApplyFailed, match="does not compute the same"):
        TECHNIQUE.apply({"Net": model}, planned("Net.attn"))
    monkeypatch.setattr("torchtrim.attention.replace._difference", lambda *_: 0.0)
    assert found.verify(original, plan_for("Net.attn")).verdict == "NOT EQUAL"


@pytest.mark.slow
def test_it_saves_more_than_the_planner_predicts() -> None:
    torch.manual_seed(0)
    ids = tokens((2, 65))
    model = Net(nn.Sequential(*(RPEAttention(on="qv") for _ in range(4))))
    found = fitting(train_step(model, ids), steps=3)
    original = found.observe()
    assert original.profile is not None
    step = step_of(original.profile)
    options = TECHNIQUE.options(step)
    assert [one.where for one in options] == [f"Net.attn.{i}" for i in range(4)]
    edits = [edit for one in options if (edit := TECHNIQUE.edits(step, one)) is not None]
    predicted = simulate(step).peak_bytes - simulate(step, edits).peak_bytes
    plan = plan_for(*(one.where for one in options))
    measured = found.run_planned(plan)
    assert 1_000_000 < predicted < original.peak_bytes - measured.peak_bytes
    assert found.verify(original, plan, measured).verdict == "ROUNDING"


def test_where_probabilities_are_dropped_it_is_not_offered_and_refused() -> None:
    model, ids = Net(RPEAttention(dropout=0.1)), tokens((2, 65))
    assert not TECHNIQUE.options(step_of(trial(train_step(model, ids))[1]))
    with pytest.raises(ApplyFailed, match="different random numbers"):
        TECHNIQUE.apply({"Net": model}, planned("Net.attn"))
    TECHNIQUE.apply({"Net": model.eval()}, planned("Net.attn"))


@pytest.mark.parametrize("name", ["swin", "irpe"])
@pytest.mark.parametrize("change", ["hook", "layer"])
def test_a_module_that_changes_later_runs_its_own_forward(name: str, change: str) -> None:
    (net, ids), (twin, _) = made(name), made(name)
    TECHNIQUE.apply({"Net": net}, planned("Net.attn"))
    seen: list[list[int]] = []
    for model in (net, twin):
        model(ids)
        attention = model.attn
        leaf, layer = next((p, m) for p, m in attention.named_modules() if isinstance(m, nn.Linear))
        seen.append(counted := [])
        if change == "hook":
            for one in list(attention.modules())[1:]:
                one.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        else:
            attention.set_submodule(leaf, nn.Sequential(layer, nn.ReLU()))
    assert torch.equal(net(ids), twin(ids))
    assert len(seen[0]) == len(seen[1])


def test_state_dict_knows_nothing_of_the_plan() -> None:
    model, ids = made("irpe")
    plain = Net(RPEAttention())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    handle = TECHNIQUE.apply({"Net": model}, planned("Net.attn"))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.allclose(plain(ids), model(ids), atol=1e-5)
    assert type(copy.deepcopy(model).attn) is RPEAttention
    handle.revert()
    handle.revert()
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_windows_with_a_mask() -> None:
    model = WindowAttention()
    nn.init.normal_(model.relative_position_bias_table)
    x, mask = torch.randn(6, 49, 32), torch.where(torch.rand(3, 49, 49) > 0.5, 0.0, -100.0)
    expected = model(x, mask)
    TECHNIQUE.apply({"WindowAttention": model}, planned("WindowAttention"))
    assert torch.allclose(model(x, mask), expected, atol=1e-5)
    assert torch.allclose(model(x, mask=mask), expected, atol=1e-5)
    assert not torch.equal(model(x, mask), expected)


def test_calls_that_ask_for_more_go_to_the_original() -> None:
    attention = DecomposedAttention(grid=(5, 5))
    nn.init.normal_(attention.rel_pos_h)
    calls: list[int] = []

    class Watched(DecomposedAttention):
        def forward(self, x: Tensor, output_attentions: bool = False) -> Tensor:
            calls.append(x.shape[1])
            return super().forward(x)

    attention.__class__ = Watched
    TECHNIQUE.apply({"Watched": attention}, planned("Watched"))
    calls.clear()
    attention(torch.randn(1, 5, 5, 32), output_attentions=False)
    assert not calls
    attention(torch.randn(1, 5, 5, 32), output_attentions=True)
    with pytest.raises(RuntimeError):
        attention(torch.randn(1, 4, 5, 32)[..., :16])
    assert calls == [5, 4]


def test_a_t5_stack_is_replaced_as_a_whole() -> None:
    torch.manual_seed(0)
    model, ids = T5Stack(), tokens((2, 40))
    expected = model(ids)
    handle = TECHNIQUE.apply({"T5Stack": model}, planned("T5Stack.block.0.SelfAttention"))
    assert torch.allclose(model(ids), expected, atol=1e-5)
    assert not torch.equal(model(ids), expected)
    _, bias = model.block[0].SelfAttention(torch.randn(1, 6, 32))
    assert bias.shape == (32, 2)
    handle.revert()
    assert torch.equal(model(ids), expected)
    profile = trial(train_step(model, ids))[1]
    (option,) = TECHNIQUE.options(step_of(profile))
    assert option.where == "T5Stack.block.0.SelfAttention"
    assert len(option.spans) == 3
    assert all(one.last <= other.first for one, other in pairwise(option.spans))


def test_layers_that_would_miss_the_bias_are_refused() -> None:
    model = nn.ModuleDict({"first": T5Attention(), "later": T5Attention(has_bias=False)})
    with pytest.raises(ApplyFailed, match="gives its bias to other layers"):
        TECHNIQUE.apply({"ModuleDict": model}, planned("ModuleDict.first"))


def test_what_cannot_be_replaced_is_said_and_nothing_changes() -> None:
    class Scaled(WindowAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, mask) * 2

    class Failing(WindowAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            raise ValueError("not today")

    model = nn.ModuleDict({"good": WindowAttention(), "scaled": Scaled(), "failing": Failing()})
    for table in model.values():
        nn.init.normal_(table.relative_position_bias_table)
    classes = [type(module) for module in model.modules()]
    for name, says in (
        ("scaled", "does not compute the same"),
        ("failing", "ValueError: not today"),
        ("good.qkv", "no relative positions"),
        ("absent", "there is no such module"),
    ):
        with pytest.raises(ApplyFailed, match=says):
            TECHNIQUE.apply({"M": model}, planned("M.good", f"M.{name}"))
        assert [type(module) for module in model.modules()] == classes


def test_it_compiles_into_one_graph() -> None:
    model, ids = made("swin")
    expected = model(ids)
    TECHNIQUE.apply({"Net": model}, planned("Net.attn"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(ids), expected, atol=1e-5)


def test_definitions_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers import SamVisionConfig, SwinConfig, T5Config, T5EncoderModel, VitDetConfig
    from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention
    from transformers.models.swin.modeling_swin import SwinAttention
    from transformers.models.vitdet.modeling_vitdet import VitDetAttention

    torch.manual_seed(0)
    vision = {"hidden_size": 32, "num_attention_heads": 2, "use_rel_pos": True}
    sam = SamVisionConfig(**vision, image_size=128, patch_size=16)
    swin = SwinConfig()
    swin._attn_implementation = "sdpa"
    det = VitDetConfig(hidden_size=32, num_attention_heads=2, use_relative_position_embeddings=True)
    cases = [
        (SamVisionAttention(sam, 0), (1, 8, 8, 32)),
        (SamVisionSdpaAttention(sam, 5), (2, 5, 5, 32)),
        (VitDetAttention(det, (6, 7)), (1, 6, 7, 32)),
        (SwinAttention(swin, 32, 2, 7), (4, 49, 32)),
    ]
    for module, shape in cases:
        module.eval()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.2)
        x = torch.randn(shape)
        expected = module(x)
        handle = TECHNIQUE.apply({"M": module}, planned("M"))
        assert torch.allclose(module(x)[0], expected[0], atol=1e-5), type(module)
        assert len(module(x)) == len(expected)
        handle.revert()
        assert torch.equal(module(x)[0], expected[0])
    config = T5Config(d_model=32, d_kv=16, d_ff=32, num_heads=2, num_layers=3, vocab_size=11)
    encoder = T5EncoderModel(config).eval()
    ids, allowed = tokens((2, 30)), torch.ones(2, 30)
    allowed[1, 20:] = 0
    expected = encoder(ids, attention_mask=allowed).last_hidden_state
    place = "T5EncoderModel.encoder.block.0.layer.0.SelfAttention"
    TECHNIQUE.apply({"T5EncoderModel": encoder}, planned(place))
    found = encoder(ids, attention_mask=allowed).last_hidden_state
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.equal(found, expected)
