"""Half precision: chosen only where it is asked for, equal to what a person writes, with the loss beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchtrim
from steps import encoder, fitting, squared, train_step
from torchtrim.errors import ApplyFailed, UsageError
from torchtrim.executor import half_precision as lowered
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step import from_profile
from torchtrim.techniques.precision import TECHNIQUE
from torchtrim.workflows.optimize.fitting import Fit, Fitting

ROOT = "TransformerEncoder"
OPTIMIZERS = {"plain_optimizer", "optimizer_in_backward", "offload_optimizer"}


def step_of(layers: int = 3) -> torchtrim.TrainStep:
    torch.manual_seed(0)
    return train_step(encoder(64, layers), torch.randn(16, 48, 64), "SGD")


def planned(step: torchtrim.TrainStep, memory: str, **options: Any) -> Fit:
    return Fitting(step, Request(steps=2), lambda _: None, Terms(**options)).nearest(
        memory_limit(memory)
    )


def part_of(of: str, dtype: str = "bfloat16") -> Technique:
    options: dict[str, str | int | float | bool] = {"of": of, "dtype": dtype}
    return Technique(name="precision", where=(ROOT,), options=options, equivalence="SEMANTIC")


def gradients(net: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    squared(net, batch).backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.slow
def test_it_is_planned_to_the_byte_with_others_and_certified_as_asked() -> None:
    fit = planned(step_of(), "24%", allow="semantic=precision", pins={"precision": [ROOT]})
    assert fit.missed is None
    assert fit.planned is not None
    assert fit.certificate is not None
    assert fit.plan.techniques[0] == part_of("compute")
    assert fit.planned.peak_bytes == pytest.approx(fit.plan.predicted.peak_bytes, rel=0.01)
    assert fit.certificate.verdict == "AS ASKED"
    asked = fit.certificate.asked
    assert asked is not None
    assert asked.techniques == ("precision",)
    assert len(asked.losses) == len(asked.original_losses) == 3
    assert asked.largest_difference is not None
    assert 0 < asked.largest_difference < 0.05
    assert "where the original's is" in fit.certificate.reason


@pytest.mark.slow
def test_it_is_never_chosen_unasked_and_the_levers_say_what_it_would_bring() -> None:
    fit = planned(step_of(2), "1%")
    assert fit.missed is not None
    assert all(one.equivalence != "SEMANTIC" for one in fit.plan.techniques)
    (lever,) = (one for one in fit.levers if one.technique == "precision")
    assert (lever.needs, lever.source) == ("--allow semantic=precision", "measured")
    assert lever.peak_bytes < 0.9 * fit.original.peak_bytes


@pytest.mark.parametrize("of", ["compute", "saved"])
def test_it_is_what_a_person_writes_and_is_reverted(of: str) -> None:
    net, batch = encoder(64, 2), torch.randn(4, 24, 64)
    plain, state = gradients(net, batch), {k: v.clone() for k, v in net.state_dict().items()}
    found = []
    for change in (TECHNIQUE.apply, TECHNIQUE.by_hand):
        handle = change({ROOT: net}, part_of(of))
        found.append(gradients(net, batch))
        handle.revert()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], plain, strict=True))
    again = gradients(net, batch)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert type(net) is nn.TransformerEncoder
    assert "forward" not in vars(net)
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def test_saved_activations_alone_take_half_and_leave_the_forward_as_it_is() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    batch = torch.randn(2048, 64)
    step = train_step(net, batch, "SGD")
    before = fitting(step).observe()
    handle = TECHNIQUE.apply(
        {"Sequential": net},
        Technique(name="precision", where=("Sequential",), options=part_of("saved").options),
    )
    result = net(batch).detach()
    after = fitting(step).observe()
    handle.revert()
    assert torch.equal(result, net(batch))
    assert after.steps[0].digests["loss:loss"] == before.steps[0].digests["loss:loss"]
    eleven_halved_and_one_widened = (11 / 2 - 1) * batch.nbytes
    assert before.peak_bytes - after.peak_bytes >= eleven_halved_and_one_widened


def test_a_storage_is_kept_once_however_many_views_of_it_are_saved() -> None:
    call = lowered._SavedTensors(torch.bfloat16, set())
    whole = torch.randn(6, 8)
    views = [whole[:, :4], whole[:, 4:], whole.t()]
    saved = [call.pack(view) for view in views]
    assert len({id(one.kept) for one in saved if isinstance(one, lowered._HalfView)}) == 1
    wide = [call.unpack(one) for one in saved]
    assert len({one.untyped_storage().data_ptr() for one in wide}) == 1
    for view, found in zip(views, wide, strict=True):
        assert found.stride() == view.stride()
        assert torch.equal(found, view.bfloat16().float())
    whole.add_(1)
    assert torch.equal(call.unpack(call.pack(whole)), whole.bfloat16().float())


def test_what_keeps_saved_tensors_goes_with_no_rounded_ones() -> None:
    barred = {*TECHNIQUE.bars(part_of("saved"))}
    assert {"recompute", "replay", "micro_batch", "offload_activations"} <= barred
    assert not barred & OPTIMIZERS
    assert not TECHNIQUE.bars(part_of("compute"))


@pytest.mark.slow
def test_a_fault_in_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    widened = lowered.AutocastForward._widened

    def off(self: lowered.AutocastForward, leaf: Any) -> Any:
        return widened(self, leaf) * 1.01

    monkeypatch.setattr(lowered.AutocastForward, "_widened", off)
    step = step_of(1)
    pins = {"precision": [ROOT], "keep": ["*.layers.*"]}
    fit = planned(step, "100%", allow="semantic=precision", pins=pins)
    assert fit.certificate is not None
    assert fit.certificate.verdict == "NOT EQUAL"
    assert "made by hand" in fit.certificate.reason


def test_what_cannot_be_is_refused_with_what_to_write() -> None:
    net = encoder(32, 1)
    with pytest.raises(ApplyFailed, match="must be `compute` or `saved`"):
        TECHNIQUE.apply({ROOT: net}, part_of("everything"))
    with pytest.raises(ApplyFailed, match="one of bfloat16, float16"):
        TECHNIQUE.apply({ROOT: net}, part_of("compute", "int8"))
    with pytest.raises(ApplyFailed, match="no parameters"):
        TECHNIQUE.apply({ROOT: nn.ReLU()}, part_of("compute"))


@pytest.mark.parametrize("allow", ["all", "semantic=", "rounding=precision", ""])
def test_words_that_allow_nothing_are_refused(allow: str) -> None:
    with pytest.raises(UsageError, match="--allow"):
        planned(step_of(1), "50%", allow=allow)


def test_a_name_of_none_is_refused() -> None:
    with pytest.raises(UsageError, match="recompute keeps the function"):
        planned(step_of(1), "50%", allow="semantic=recompute")
    with pytest.raises(UsageError, match="give --allow semantic=precision too"):
        planned(step_of(1), "50%", pins={"precision": ["*"]})


def test_a_loss_that_is_called_by_itself_is_no_place() -> None:
    net, criterion = nn.Linear(64, 256), nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = criterion(model(batch), torch.zeros(64, 256))
        return found

    step = torchtrim.TrainStep(net, loss, optimizer, torch.randn(64, 64))
    trial = Fitting(step, Request(steps=1), lambda _: None).observe()
    assert trial.profile is not None
    assert "MSELoss" in {module.path for module in trial.profile.modules}
    options = TECHNIQUE.options(from_profile.step_of(trial.profile, 1.0))
    assert {one.where for one in options} == {"Linear"}
