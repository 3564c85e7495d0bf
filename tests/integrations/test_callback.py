"""`TorchtrimCallback` and `TorchtrimHook` in stand-ins for the libraries: each trains the same as without."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integrations import trainers
from torchtrim.errors import UsageError
from torchtrim.integrations import TorchtrimCallback, TorchtrimHook
from torchtrim.records.files import load_plan
from torchtrim.workflows import in_training


@functools.cache
def plain(kind: Any) -> list[float]:
    trainer = kind()
    return trainer.fit() if kind is trainers.LightningTrainer else trainer.train()


class Peek:
    """A callback after torchtrim's: whether a plan is applied at the end of each step."""

    def __init__(self, callback: TorchtrimCallback) -> None:
        self.applied: list[bool] = []
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        def told(*_: Any, **__: Any) -> None:
            if name == "on_step_end":
                self.applied.append(bool(self._callback._fitting._applied._handles))

        return told


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "report"


@pytest.mark.slow
def test_a_trainer_of_transformers_is_planned_and_trains_the_same(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = TorchtrimCallback(memory="70%", out=out)
    trainer = trainers.TransformersTrainer(callback, peek := Peek(callback))
    unplanned = trainers.TransformersTrainer()
    unplanned.train()
    assert trainer.train() == plain(trainers.TransformersTrainer)
    assert trainer.metrics == unplanned.metrics
    assert trainer.tokens == unplanned.tokens
    assert "training_step" not in vars(trainer)
    assert peek.applied == [False, True, True, True, True]
    assert not callback._fitting._applied._handles
    assert callback.result is not None
    report = callback.result.report
    assert report.certificate is not None
    assert report.certificate.verdict == "BITWISE"
    assert load_plan(out / "plan.toml").techniques
    assert {one.name for one in out.iterdir()} >= {"report.html", "report.json", "plan.toml"}
    said = capsys.readouterr().err
    assert "identical bit for bit. The plan is applied." in said
    assert str(out / "report.html") in said


@pytest.mark.slow
def test_a_trainer_can_train_again(out: Path) -> None:
    callback = TorchtrimCallback(memory="70%", out=out)
    trainer, unplanned = trainers.TransformersTrainer(callback), trainers.TransformersTrainer()
    for _ in range(2):
        assert trainer.train() == unplanned.train()
        assert callback.result is not None


@pytest.mark.slow
def test_lightning_is_planned_and_trains_and_logs_the_same(out: Path) -> None:
    callback = TorchtrimCallback(memory="80%", out=out)
    trainer = trainers.LightningTrainer(callback)
    assert trainer.fit() == plain(trainers.LightningTrainer)
    assert len(trainer.module.logged) == trainers.STEPS * trainers.ACCUMULATED
    assert "log" not in vars(trainer.module)
    assert callback.result is not None
    assert callback.result.plan is not None
    assert {where for one in callback.result.plan.techniques for where in one.where}
    assert callback.state_dict() == {}


def loop(hook: Any = None) -> tuple[list[float], trainers.Accelerator]:
    model = trainers.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator = trainers.Accelerator(optimizer)
    loss_of = trainers.loss_of if hook is None else hook(accelerator)(trainers.loss_of)
    torch.manual_seed(2)
    for micro_batches in trainers.batches():
        for batch in micro_batches:
            accelerator.backward(loss_of(model, **batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return trainers.weights(model), accelerator


@pytest.mark.slow
def test_a_loop_with_accelerate_is_planned_and_trains_the_same(out: Path) -> None:
    hooks: list[TorchtrimHook] = []

    def hooked(accelerator: Any) -> TorchtrimHook:
        hooks.append(TorchtrimHook(accelerator, memory="70%", out=out))
        return hooks[0]

    (found, accelerator), (expected, _) = loop(hooked), loop()
    assert found == expected
    assert accelerator.ended == 1
    assert not {"clip_grad_norm_", "end_training"} & {*vars(accelerator)}
    result = hooks[0].result
    assert result is not None
    assert result.report.certificate is not None
    assert result.report.certificate.verdict == "BITWISE"


@pytest.mark.slow
def test_a_budget_that_no_plan_meets_leaves_the_training_unplanned(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = TorchtrimCallback(memory="3%", out=out)
    assert trainers.TransformersTrainer(callback).train() == plain(trainers.TransformersTrainer)
    said = capsys.readouterr().err
    assert said.count("Training goes on without a plan.") == 1
    assert callback.result is not None
    assert f"(memory={callback.result.report.floor_bytes})" in said


@pytest.mark.parametrize("place", ["Fitting", "apply_plan"])
def test_a_failure_of_torchtrim_never_ends_a_training(
    place: str, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(in_training, place, fails)
    trainer = trainers.TransformersTrainer(TorchtrimCallback(memory="70%", out=out))
    assert trainer.train() == plain(trainers.TransformersTrainer)
    said = capsys.readouterr().err
    assert "planning failed: RuntimeError: a defect. Training goes on without a plan." in said


def test_a_folder_that_cannot_be_written_costs_only_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    callback = TorchtrimCallback(memory="70%", out=tmp_path / "file")
    assert trainers.TransformersTrainer(callback).train() == plain(trainers.TransformersTrainer)
    said = capsys.readouterr().err
    assert "The plan is applied. The report was not written:" in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"world_size": 2}, "several devices or processes"),
        ({"n_gpu": 2}, "several devices or processes"),
        ({"torch_compile": True}, "torch_compile=True"),
    ],
)
def test_what_cannot_be_planned_is_said_once(
    change: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = trainers.TransformersTrainer(callback := TorchtrimCallback(memory="70%"))
    vars(trainer.args).update(change)
    assert trainer.train() == plain(trainers.TransformersTrainer)
    said = capsys.readouterr().err
    assert said.count("torchtrim:") == 1
    assert reason in said
    assert callback.result is None


def test_lightning_and_accelerate_refuse_what_they_cannot_repeat(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = trainers.LightningTrainer(TorchtrimCallback(memory="70%"))
    trainer.module.automatic_optimization = False
    assert trainer.fit() == plain(trainers.LightningTrainer)
    assert "automatic_optimization is False" in capsys.readouterr().err
    trainer = trainers.LightningTrainer(TorchtrimCallback(memory="70%"))
    trainer.precision_plugin.scaler = object()
    assert trainer.fit() == plain(trainers.LightningTrainer)
    assert "use 'bf16-mixed'" in capsys.readouterr().err

    def scaled(accelerator: Any) -> TorchtrimHook:
        accelerator.scaler = object()
        return TorchtrimHook(accelerator, memory="70%")

    assert loop(scaled)[0] == loop()[0]
    assert capsys.readouterr().err.count("use 'bf16'") == 1


def test_another_version_of_a_library_trains_unplanned(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainers.TransformersTrainer(TorchtrimCallback(memory="70%"))
    del trainer.args.n_gpu
    assert trainer.train() == plain(trainers.TransformersTrainer)
    assert capsys.readouterr().err.count("planning failed: AttributeError") == 1

    def without_optimizers(accelerator: Any) -> TorchtrimHook:
        del accelerator._optimizers
        return TorchtrimHook(accelerator, memory="70%")

    assert loop(without_optimizers)[0] == loop()[0]
    assert capsys.readouterr().err.count("planning failed: AttributeError") == 1


def test_a_training_that_ends_early_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainers.TransformersTrainer(TorchtrimCallback(memory="70%", after=10))
    assert trainer.train() == plain(trainers.TransformersTrainer)
    assert "the training ended after 5 steps, and a plan needs 10." in capsys.readouterr().err


def test_an_optimizer_that_takes_a_closure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    fitting = in_training.InTraining("70%")
    model = trainers.network()
    lbfgs = torch.optim.LBFGS(model.parameters())
    for _ in range(2):
        fitting.micro_batch(torch.ones(2, 32))
        fitting.step_ended(lambda: in_training.Trainer(model, lbfgs, print, print))
    assert "LBFGS calls the loss several times" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [{"memory": "many"}, {"memory": "60%", "after": 1}, {"memory": "60%", "allow": "all"}],
)
def test_a_mistake_is_said_before_the_training(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TorchtrimCallback(**options)
    with pytest.raises(UsageError):
        TorchtrimHook(SimpleNamespace(), **options)


def test_unknown_attributes_are_no_events() -> None:
    callback = TorchtrimCallback(memory="70%")
    callback.on_some_new_event(1, two=2)
    with pytest.raises(AttributeError, match="no attribute 'model'"):
        _ = callback.model


def test_an_exception_of_the_training_reverts_the_plan(out: Path) -> None:
    callback = TorchtrimCallback(memory="80%", out=out)
    trainer = trainers.LightningTrainer(callback)
    trainer.fit()
    callback.on_exception(trainer, trainer.module, ValueError())
    assert not callback._fitting._applied._handles
