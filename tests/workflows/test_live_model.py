"""optimize_memory for a stranger: what it returns, what it refuses, and that mistakes are caught."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchtrim
from models import SAMPLES
from torchtrim.executor.network import out_variants as ways
from torchtrim.workflows.live_model import seconds_of_call


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16 * 36, 4)).eval(), torch.randn(8, 3, 12, 12)


def test_it_returns_what_was_measured_and_proved() -> None:
    model, inputs = net()
    with torchtrim.optimize_memory(model, inputs) as fitted:
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"
        assert "1 output x 2 steps" in fitted.certificate.compared
        assert fitted.planned is not None
        assert fitted.original is not None
        assert fitted.planned.peak_bytes < fitted.original.peak_bytes
        assert fitted.after.outputs < fitted.before.outputs
        assert torchtrim.count_memory(model, inputs) == fitted.after
        assert [t.name for t in fitted.plan.techniques] == ["release", "in_place", "arena"]
    assert type(model) is nn.Sequential


def test_it_says_what_a_call_costs_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.5, 0.75])
    monkeypatch.setattr("torchtrim.workflows.live_model.seconds_of_call", lambda *_: next(seconds))
    model, inputs = net()
    with torchtrim.optimize_memory(model, inputs) as fitted:
        assert fitted.slowdown == 1.5
        assert "a call takes 1.50 times as long: 750.0 ms instead of 500.0" in fitted.notes
    with torchtrim.optimize_memory(model, inputs, verify=False) as fitted:
        assert fitted.slowdown is None


def test_it_says_that_nothing_is_saved() -> None:
    model, inputs = nn.Sequential(nn.Linear(64, 64)).eval(), torch.randn(4, 64)
    with torchtrim.optimize_memory(model, inputs) as fitted:
        assert any(
            note.startswith("the plan saves no memory: apart from the model a call takes")
            for note in fitted.notes
        )
    model, inputs = net()
    model.aside = nn.Parameter(torch.zeros(1 << 20))
    with torchtrim.optimize_memory(model, inputs) as fitted:
        assert not any("saves no memory" in note for note in fitted.notes)


def test_the_time_of_a_call_is_taken_without_a_change_to_the_model() -> None:
    model, inputs = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert seconds_of_call(model, inputs) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["resnet", "unet", "lstm", "inplace", "encoder"])
def test_models_of_every_kind(name: str) -> None:
    torch.manual_seed(0)
    sample = SAMPLES[name]()
    sample.model.eval()
    with torchtrim.optimize_memory(sample.model, sample.inputs) as fitted:
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"


def test_a_wrong_way_to_write_is_caught_and_the_model_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ReLU that is none, as a pooling index was shared wrongly in OptNet's issue 14."""

    def wrong(*_: object) -> ways.OutVariant:
        return ways.OutVariant(lambda args, kwargs, place: place.copy_(args[0] + 1), always=True)

    monkeypatch.setitem(ways._SPECIAL, torch.ops.aten.relu.default, wrong)
    model, inputs = net()
    with torch.no_grad():
        wanted = model(inputs)
    with pytest.raises(torchtrim.ApplyFailed, match=r"does not equal.*model is unchanged"):
        torchtrim.optimize_memory(model, inputs)
    assert type(model) is nn.Sequential
    assert torch.equal(model(inputs), wanted)


def test_wrong_arguments_are_told() -> None:
    model, inputs = net()
    with pytest.raises(torchtrim.UsageError, match=r"expected a torch\.nn\.Module"):
        torchtrim.optimize_memory(F.relu, inputs)  # type: ignore[arg-type]
    with pytest.raises(torchtrim.UsageError, match="'inference' or 'training'"):
        torchtrim.optimize_memory(model, inputs, "eval")  # type: ignore[arg-type]
    with pytest.raises(torchtrim.UsageError, match="split_batch=0"):
        torchtrim.optimize_memory(model, inputs, split_batch=0)
    with pytest.raises(torchtrim.UsageError, match=r"model.eval\(\)"):
        torchtrim.optimize_memory(model.train(), inputs)
    with pytest.raises(torchtrim.UsageError, match="split_batch is for mode='inference'"):
        torchtrim.optimize_memory(model, inputs, "training", split_batch=2)
    with pytest.raises(torchtrim.UsageError, match="memory is for mode='training'"):
        torchtrim.optimize_memory(model, inputs, memory="60%")
    with pytest.raises(torchtrim.UsageError, match="requires a gradient"):
        torchtrim.optimize_memory(model.requires_grad_(False), inputs, "training")


def deep() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        norm = nn.BatchNorm2d(16)
        layers += [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), norm, nn.LeakyReLU(0.1))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 144, 4)), torch.randn(8, 3, 12, 12)


def test_training_in_less_memory_is_proved_and_the_model_is_as_it_was() -> None:
    model, inputs = deep()
    model(inputs).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = torchtrim.count_memory(model, inputs, "training")
    with torchtrim.optimize_memory(model, inputs, "training") as fitted:
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"
        assert fitted.planned is not None
        assert fitted.original is not None
        assert fitted.planned.peak_bytes < fitted.original.peak_bytes
        assert fitted.planned.peak_bytes <= 1.02 * fitted.plan.predicted.peak_bytes
        assert fitted.after.total < 0.7 * fitted.before.total
        assert {one.name for one in fitted.plan.techniques} > {"overwrite"}
        assert torchtrim.count_memory(model, inputs, "training") == fitted.after
        with pytest.raises(torchtrim.Unsupported, match="mode='inference'"):
            fitted.graph()
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torchtrim.count_memory(model, inputs, "training") == before
    assert not model[1][2].inplace


def test_training_within_a_budget_and_without_overwriting() -> None:
    model, inputs = deep()
    given = {"mode": "training", "inplace": False, "verify": False}
    whole = torchtrim.optimize_memory(model, inputs, memory="100%", **given)
    assert whole.plan.techniques == ()
    whole.revert()
    some = torchtrim.optimize_memory(model, inputs, memory="85%", **given)
    assert some.plan.techniques
    assert "overwrite" not in [one.name for one in some.plan.techniques]
    assert some.after.total <= 0.85 * some.before.total + inputs.nbytes
    some.revert()
    with pytest.raises(torchtrim.InfeasibleBudget, match="smallest found"):
        torchtrim.optimize_memory(model, inputs, memory="1KiB", **given)


def test_inputs_that_do_not_fit_fail_as_the_model_does() -> None:
    model, _ = net()
    with pytest.raises(RuntimeError):
        torchtrim.optimize_memory(model, torch.randn(8, 4, 12, 12))
    assert type(model) is nn.Sequential


def test_the_picture_is_drawn_and_saved(tmp_path: Path) -> None:
    model, inputs = net()
    fitted = torchtrim.optimize_memory(model, inputs, verify=False, split_batch=2)
    picture = fitted.graph()
    ElementTree.fromstring(picture.svg())
    assert "2 parts of 4 of 8 samples" in picture.svg()
    assert picture.dot().count("label=") == sum(
        len(section.operators) + 1 for section in picture.record.sections
    )
    assert picture.save(tmp_path / "net.svg").read_text() == picture.svg()
    assert picture.save(tmp_path / "net.dot").read_text() == picture.dot()
    with pytest.raises(torchtrim.UsageError, match=r"\.svg, \.dot"):
        picture.save(tmp_path / "net.png")
