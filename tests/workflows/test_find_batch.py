"""The largest batch that fits is one that was run, and one more was run and does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtrim
from steps import ConvNet, encoder, flat, images, squared, train_step
from torchtrim import Script, TrainStep, UsageError
from torchtrim.records.estimate import GrowthLimit
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.trials import run_trial
from torchtrim.workflows.find_batch import BatchSearch, advice, probe_note

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "plain.py")
REQUEST = Request(steps=1)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4)
    )


STEPS: dict[str, Callable[[], TrainStep]] = {
    "mlp": lambda: train_step(mlp(), torch.randn(8, 32)),
    "blocks": lambda: train_step(ConvNet(), images(16, 4)),
    "flat": lambda: train_step(flat(), images(16, 4)),
    "encoder": lambda: train_step(encoder(), torch.randn(2, 12, 32), "SGD"),
    "lstm": lambda: TrainStep(
        net := nn.LSTM(8, 16, batch_first=True),
        lambda model, batch: model(batch)[0].square().mean(),
        torch.optim.SGD(net.parameters(), 0.1),
        torch.randn(4, 6, 8),
    ),
}


def _rebuilt(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[0][:, :4]).square().mean()


STEPS["labels that nobody reads"] = lambda: TrainStep(
    net := mlp(),
    _rebuilt,
    torch.optim.SGD(net.parameters(), 0.1),
    (torch.randn(8, 32), torch.zeros(8, 64, dtype=torch.int64)),
)


def peak_at(step: TrainStep, batch: int, tmp_path: Path) -> int:
    """What a step of that batch needs, where there is no other."""
    now = len(step.batch[0] if isinstance(step.batch, tuple) else step.batch)
    alone = step.resized(0, now, batch)
    step.batch, step._second, step._turn = alone.batch, None, alone._turn
    trial: Trial = run_trial(step, REQUEST, tmp_path, lambda _: None)
    return trial.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_it_is_exact_in_at_most_four_runs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    state = {key: value.clone() for key, value in step.model.state_dict().items()}
    budget = 3 * torchtrim.estimate(step).peak_bytes
    found = torchtrim.find_batch(step, budget)
    assert found.exact
    assert 1 <= len(found.probes) <= 4
    assert peak_at(step, found.largest, tmp_path) == found.peak_bytes <= budget
    assert peak_at(step, found.largest + 1, tmp_path) == found.next_bytes > budget
    assert all(torch.equal(value, state[key]) for key, value in step.model.state_dict().items())


@pytest.mark.slow
def test_a_prediction_that_is_wrong_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    step = STEPS["mlp"]()
    budget = 3 * torchtrim.estimate(step).peak_bytes
    right = torchtrim.find_batch(step, budget)
    real = BatchSearch._measured

    def more(search: BatchSearch, batch: int) -> int:
        return real(search, batch) + budget // 10

    monkeypatch.setattr(BatchSearch, "_measured", more)
    found = torchtrim.find_batch(step, budget)
    assert found.exact
    assert found.largest < right.largest
    assert not found.probes[0].fits
    assert all(one.peak_bytes is not None for one in found.probes)


def test_where_none_fits_a_batch_of_one_was_run() -> None:
    step = STEPS["mlp"]()
    found = torchtrim.find_batch(step, torchtrim.estimate(step).peak_bytes // 2)
    assert (found.largest, found.peak_bytes, found.exact) == (0, None, True)
    assert [(one.length, one.fits) for one in found.probes] == [(1, False)]


def test_an_answer_is_never_untested() -> None:
    step = STEPS["mlp"]()
    found = torchtrim.find_batch(step, "64MiB", probes=1)
    (one,) = found.probes
    assert found.largest == (one.length if one.fits else 0)
    assert not found.exact
    with pytest.raises(UsageError, match="at least one batch has to be tried"):
        torchtrim.find_batch(step, "64MiB", probes=0)


def test_a_batch_that_does_not_run_does_not_fit() -> None:
    class Few(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 9:
                raise ValueError("nine at most")
            return self.net(x)

    model = Few()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = torchtrim.find_batch(TrainStep(model, squared, optimizer, torch.randn(8, 32)), "1GiB")
    assert (found.largest, found.exact) == (9, True)
    assert found.limited_by == "ValueError: nine at most"


def test_what_is_said_of_it() -> None:
    found = GrowthLimit(
        what="batch",
        budget_bytes=1000,
        now=8,
        largest=32,
        peak_bytes=900,
        next_bytes=1010,
        exact=True,
    )
    assert "4 times" in advice(found)
    assert "with Adam by 2" in advice(found)
    assert probe_note(found).endswith("one more does not fit")


@pytest.mark.slow
def test_a_script_is_run_at_the_batches_of_its_loaders() -> None:
    script = Script(SCRIPT, ("--workers", "1"), device="cpu", timeout=120)
    found = torchtrim.find_batch(script, "450KiB")
    assert found.exact
    assert found.now == 64
    assert found.peak_bytes is not None
    assert found.peak_bytes <= 450 * 1024
