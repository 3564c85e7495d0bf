"""Syncs inside libraries, and the line of configuration that ends each."""

from __future__ import annotations

import ast

import pytest

from torchtrim.rewriter.advice import ADVICE, SettingAdvice, advice_at, advice_for, advice_in
from torchtrim.source.source import SourceFile

SITE = "/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("path", "function", "name"),
    [
        ("torch/amp/grad_scaler.py", "_maybe_opt_step", "grad-scaler"),
        ("torch/amp/grad_scaler.py", "get_scale", "loss-scale"),
        ("accelerate/optimizer.py", "step", "loss-scale"),
        ("megatron/core/optimizer/optimizer.py", "get_loss_scale", "unscaled-loss-scale"),
        ("torch/optim/adam.py", "_single_tensor_adam", "optimizer-state"),
        (
            "lightning/pytorch/trainer/connectors/logger_connector/result.py",
            "metrics",
            "lightning-progress-bar",
        ),
        ("pytorch_lightning/core/module.py", "__to_tensor", "lightning-logged-device"),
        ("torch/distributions/categorical.py", "__init__", "distribution-validation"),
        ("ultralytics/utils/ops.py", "time", "ultralytics-profile"),
        ("apex/optimizers/fused_adam.py", "step", "apex-adam"),
        ("C:\\x\\torch\\optim\\adam.py", "step", "optimizer-state"),
    ],
)
def test_a_library_that_waits_is_known(path: str, function: str, name: str) -> None:
    found = advice_for(f"{SITE}/{path}", function)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("path", ["train.py", "my/optim/adam.py", "nottorch/optim/adam.py"])
def test_what_is_the_users_own_is_not(path: str) -> None:
    assert advice_for(path, "step") is None


def test_calls_of_the_users_own_source_are_found_by_line() -> None:
    text = (
        "from torch.amp import GradScaler\n"
        "from torch.distributions import Categorical\n"
        "scaler = GradScaler()\n"
        "off = GradScaler(enabled=False)\n"
        "action = Categorical(logits=x).sample()\n"
        "scale = scaler.get_scale()\n"
    )
    found = [(one.line, one.advice.name) for one in advice_in(SourceFile("train.py", text))]
    assert found == [(3, "grad-scaler"), (5, "distribution-validation"), (6, "loss-scale")]


def test_what_was_made_by_such_a_call_has_its_advice() -> None:
    text = (
        "from torch.amp import GradScaler\n"
        "scaler = GradScaler()\n"
        "other.step(optimizer)\n"
        "scaler.step(optimizer)\n"
    )
    source = SourceFile("train.py", text)
    found = [advice_at(source, line) for line in (1, 3, 4)]
    assert [one and one.name for one in found] == [None, None, "grad-scaler"]


def test_a_name_of_another_module_is_not_meant() -> None:
    text = "from mine import Categorical\nc = Categorical(logits=x)\n"
    assert not list(advice_in(SourceFile("train.py", text)))


@pytest.mark.parametrize("advice", ADVICE, ids=lambda one: one.name)
def test_each_line_can_be_written(advice: SettingAdvice) -> None:
    ast.parse(advice.line)


def test_names_are_different() -> None:
    assert len({one.name for one in ADVICE}) == len(ADVICE)
