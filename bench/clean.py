"""Whether a certificate ever calls equal runs different: plans of small models, programs beside themselves.

python -m bench.clean [--pairs 300] [--scripts 24] [--json]

A pair is a model with a plan that recomputes places drawn at random, which keeps the function: each verdict
but BITWISE and ROUNDING is a false alarm. Others are one step made twice, and a program of `cases/faulty`
beside a copy of itself.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from bench.faults import PROGRAMS
from bench.machine import save
from torchtrim.capture.workload import TrainStep
from torchtrim.errors import ApplyFailed, PlannedStepFailed
from torchtrim.planner.plans import build_plan
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.verify import verify_pair

STEPS = Request(steps=2)


class Residual(nn.Module):
    """A convolution with a norm and dropout, and a way around; counts its calls in evaluation."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.drop = norm, nn.Dropout(0.2)
        self.evaluated = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.evaluated += not self.training
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


class Language(nn.Module):
    """Tied embeddings around encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        layers = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


class Recurrent(nn.Module):
    """An LSTM, its last state, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return result


def _images() -> torch.Tensor:
    return torch.randn(4, 8, 16, 16)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "batch norm": (
        lambda: nn.Sequential(*(Residual(nn.BatchNorm2d(8)) for _ in range(4))),
        _images,
    ),
    "group norm": (
        lambda: nn.Sequential(*(Residual(nn.GroupNorm(2, 8)) for _ in range(4))),
        _images,
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 64, batch_first=True), 3, enable_nested_tensor=False
        ),
        lambda: torch.randn(4, 24, 16),
    ),
    "language": (Language, lambda: torch.randint(31, (4, 24))),
    "recurrent": (Recurrent, lambda: torch.randn(6, 12, 8)),
    "flat": (
        lambda: nn.Sequential(
            *(m for _ in range(6) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()))
        ),
        _images,
    ),
    "perceptron": (
        lambda: nn.Sequential(
            *(m for _ in range(5) for m in (nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.1)))
        ),
        lambda: torch.randn(64, 24),
    ),
}
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop")


def step_of(name: str, seed: int) -> TrainStep:
    """A step of the model, the same for the same seed."""
    torch.manual_seed(seed)
    make, batch = MODELS[name]
    model = make()
    optimizer = getattr(torch.optim, OPTIMIZERS[seed % len(OPTIMIZERS)])
    return TrainStep(
        model,
        lambda model, batch: model(batch).square().mean(),
        optimizer(model.parameters(), lr=1e-3),
        batch(),
    )


def planned(name: str, seed: int) -> Iterator[str]:
    """Verdicts on plans of one step: places drawn at random."""
    fitting = Fitting(step_of(name, seed), STEPS, lambda _: None, Terms(allow="ROUNDING"))
    original = fitting.observe()
    rng = random.Random(seed)
    assert original.profile is not None
    places = [one.path for one in original.profile.modules if one.path.count(".") == 1]
    for plan in (recomputing(rng, places) for _ in range(4)):
        try:
            yield fitting.verify(original, plan).verdict
        except (PlannedStepFailed, ApplyFailed):
            continue


def recomputing(rng: random.Random, places: list[str]) -> Plan:
    """A plan that runs some of the places again, with dropout and norms in them."""
    where = tuple(sorted(rng.sample(places, rng.randint(1, len(places)))))
    return build_plan(
        "",
        fingerprint={},
        techniques=(Technique(name="recompute", where=where),),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
        budget_bytes=1,
    )


def beside_itself(name: str, seed: int) -> str:
    """The verdict on the same step, made twice."""
    result = verify_pair(step_of(name, seed), step_of(name, seed), STEPS)
    assert result.report.certificate is not None
    return result.report.certificate.verdict


def script(path: Path, seed: int) -> str:
    """The verdict on a program beside its copy."""
    with tempfile.TemporaryDirectory(prefix="torchtrim-") as folder:
        text = path.read_text().replace("torch.manual_seed(0)", f"torch.manual_seed({seed})")
        pair = []
        for name in ("one.py", "two.py"):
            copy = Path(folder) / name
            copy.write_text(text)
            pair.append(Script(str(copy), device="cpu", timeout=60.0))
        request = Request(warmup=1, steps=1, measured=False)
        result = verify_pair(pair[0], pair[1], request)
    assert result.report.certificate is not None
    return result.report.certificate.verdict


def main() -> None:
    """Try pairs, and count the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--scripts", type=int, default=24)
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    total, seed = 0, 0
    while total < options.pairs:
        for name in MODELS:
            found = [*planned(name, seed), beside_itself(name, seed)]
            counts.setdefault(name, Counter()).update(found)
            total += len(found)
        seed += 1
        print(total, sum(counts.values(), Counter()), flush=True)
    programs = sorted(PROGRAMS.glob("*.py"))
    for number in range(options.scripts):
        path = programs[number % len(programs)]
        counts.setdefault(path.name, Counter()).update([script(path, number)])
    whole = sum(counts.values(), Counter())
    print(whole)
    if options.json:
        figures = {name: dict(count) for name, count in counts.items()}
        print(save("clean", {"pairs": whole.total(), "verdicts": dict(whole), "of": figures}))


if __name__ == "__main__":
    main()
