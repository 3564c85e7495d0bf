"""How small a fault may be that a certificate still sees: planted in programs at sizes from 1e-2 to 1e-12.

python -m bench.fault_sizes [MODEL ...] [--seeds 0 1] [--only KIND] [--json]

A program is a model of `bench.clean` with an optimizer, in float64: in float32 most faults of 1e-9 change
no bit. A fault multiplies something by 1 + size. The sound program has the same hooks, with size 0. Of each
fault, the size is bisected by powers of ten: the smallest that is NOT EQUAL, taking larger ones as seen.
Beside a fault that is not seen at 1e-10: the size at which it changes what float64 rounds. Each run replaces
the programs of the result that it is asked for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.clean import MODELS, OPTIMIZERS
from bench.machine import RESULTS, save, slug
from torchtrim.capture.workload import TrainStep
from torchtrim.records.certificate import Certificate
from torchtrim.records.trial import Request
from torchtrim.workflows.verify import verify_pair

STEPS = Request(steps=1, measured=False)
KINDS = (
    *(
        "loss",
        "loss from the third step on",
        "term of the loss",
        "output",
        "one sample of the output",
    ),
    *("activation", "input", "one weight", "one gradient", "one element of a gradient"),
    *("update", "optimizer state"),
)
SMALLEST = 12
LARGEST_SEEN = 10  # of exponents: a fault seen at 1e-10 needs no excuse
_TRIED = 1e-6


class Planted(nn.Module):
    """A model whose quantity of a kind is scaled by 1 + size; counts its calls."""

    def __init__(self, model: nn.Module, kind: str, size: float) -> None:
        super().__init__()
        self.model = model
        # A function is no attribute that a certificate compares, as a size would be.
        self._by: Callable[[str], float] = lambda one: size if one == kind else 0.0
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.matrices = [one for one in model.parameters() if one.dim() > 1]
        parts = [one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv2d)]
        parts[len(parts) // 2].register_forward_hook(
            lambda _m, _i, out: self._scaled("activation", out)
        )
        middle = self.matrices[len(self.matrices) // 2]
        middle.register_hook(self._of_gradient)
        with torch.no_grad():
            middle.copy_(self._scaled("one weight", middle))

    def _scaled(self, kind: str, value: torch.Tensor) -> torch.Tensor:
        return value * (1.0 + self._by(kind))

    def _of_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        largest = torch.zeros_like(grad).flatten()
        largest[grad.abs().argmax()] = self._by("one element of a gradient")
        return self._scaled("one gradient", grad) * (1.0 + largest.view_as(grad))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if batch.is_floating_point():
            batch = self._scaled("input", batch)
        self.calls += 1
        out = self._scaled("output", self.model(batch))
        first = torch.zeros(out.shape[0], dtype=out.dtype)
        first[0] = self._by("one sample of the output")
        result: torch.Tensor = out * (1.0 + first.view(-1, *[1] * (out.dim() - 1)))
        return result

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        out = self(batch)
        loss = self._scaled("loss", out.square().mean())
        if int(self.calls) > 2:
            loss = self._scaled("loss from the third step on", loss)
        return loss + self._by("term of the loss") * out.abs().mean()


def _hooked(
    optimizer: torch.optim.Optimizer, kind: str, size: float, parameter: nn.Parameter
) -> None:
    before: list[torch.Tensor] = []
    in_update, in_state = (size if kind == one else 0.0 for one in ("update", "optimizer state"))

    def pre(*_: Any) -> None:
        before[:] = [parameter.detach().clone()]

    def post(*_: Any) -> None:
        with torch.no_grad():
            parameter.add_((parameter - before[0]) * in_update)
            for value in optimizer.state[parameter].values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.mul_(1.0 + in_state)

    optimizer.register_step_pre_hook(pre)
    optimizer.register_step_post_hook(post)


def step_of(name: str, seed: int, kind: str, size: float) -> TrainStep:
    """Return the step of a program with a fault."""
    torch.manual_seed(seed)
    make, batch_of = MODELS[name]
    model = Planted(make().double(), kind, size)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        one: getattr(torch.optim, one) for one in OPTIMIZERS
    }
    chosen = OPTIMIZERS[seed % len(OPTIMIZERS)]
    options = {"momentum": 0.9} if chosen == "SGD" else {}
    optimizer = kinds[chosen](model.parameters(), lr=1e-3, **options)
    _hooked(optimizer, kind, size, model.matrices[-1])
    batch = batch_of()
    batch = batch.double() if batch.is_floating_point() else batch
    return TrainStep(model, lambda model, batch: model.loss(batch), optimizer, batch)


def certificate(name: str, seed: int, kind: str, size: float) -> Certificate:
    """Compare a program with itself, with a fault of a size."""
    pair = (step_of(name, seed, kind, one) for one in (0.0, size))
    found = verify_pair(*pair, STEPS).report.certificate
    assert found is not None
    return found


def smallest(name: str, seed: int, kind: str) -> dict[str, Any]:
    """Return the exponent of the smallest fault that is seen, and what the next smaller one is called."""
    seen, missed, verdict = 1, SMALLEST + 1, ""
    while missed - seen > 1:
        middle = (seen + missed) // 2 if verdict else SMALLEST  # most are seen at every size
        one = certificate(name, seed, kind, 10.0**-middle)
        if one.verdict == "NOT EQUAL":
            seen = middle
        else:
            missed, verdict = middle, one.verdict
    found = {"seen": seen, "below": verdict}
    return found | ({"noise": own_noise(name, seed, kind)} if seen < LARGEST_SEEN else {})


def own_noise(name: str, seed: int, kind: str) -> float:
    """Return the size of a fault whose largest change in three steps is what float64 rounds.

    A change is relative to the largest value of its kind. A parameter is larger than its update, and a norm
    divides out a scale before it.
    """
    plain, other = (_values(step_of(name, seed, kind, one), seed) for one in (0.0, _TRIED))
    effects = []
    for values, others in zip(plain, other, strict=True):
        gaps = [float((a - b).abs().max()) for a, b in zip(values, others, strict=True)]
        effects.append(max(gaps) / max(float(one.abs().max()) for one in values))
    return torch.finfo(torch.float64).eps * _TRIED / max(effects)


def _values(step: TrainStep, seed: int) -> list[list[torch.Tensor]]:
    """Return parameters and optimizer states of each kind after each of three steps."""
    torch.manual_seed(seed)
    found: list[list[torch.Tensor]] = []
    (optimizer,) = step.optimizers
    for number in range(3):
        step.step(number)
        kinds: dict[str, list[torch.Tensor]] = {"": [*step.model.parameters()]}
        for state in optimizer.state.values():
            for key, value in state.items():
                kinds.setdefault(key, []).append(value)
        found += [[one.detach().clone() for one in kind] for kind in kinds.values()]
    return found


def summary(rows: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return how many faults are seen at each size."""
    cells = [cell for row in rows.values() for cell in row.values()]
    exponents = [cell["seen"] for cell in cells]
    return {
        "seen_from_1e-9_or_100_times_float64s_noise": sum(
            cell["seen"] >= 9 or 10.0 ** -(cell["seen"] + 1) < 100 * cell.get("noise", 0.0)
            for cell in cells
        ),
        "programs": len(rows),
        "faults": len(exponents),
        "seen": {f"1e-{e}": sum(one >= e for one in exponents) for e in range(2, SMALLEST + 1)},
    }


def main() -> None:
    """Bisect, and put the result beside those of other programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--only", default="", help="a kind")
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    path = RESULTS / slug() / "fault_sizes.json"
    rows = json.loads(path.read_text())["of"] if options.json and path.exists() else {}
    for name in options.models or MODELS:
        for seed in options.seeds:
            program = f"{name}, {OPTIMIZERS[seed % len(OPTIMIZERS)]}"
            for kind in [options.only] if options.only else KINDS:
                if kind == "input" and not MODELS[name][1]().is_floating_point():
                    continue
                found = smallest(name, seed, kind)
                rows.setdefault(program, {})[kind] = found
                print(program, kind, found, flush=True)
                if options.json:
                    save("fault_sizes", {**summary(rows), "of": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
