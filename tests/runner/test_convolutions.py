"""Convolutions by shifts compute what torch's do."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import draws
from torchtrim.runner import convolutions
from torchtrim.runner.perturbed import Perturbed


@pytest.mark.parametrize("number", draws.some(range(160)))
def test_results_and_gradients_are_torchs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_LEAST", 0)
    called: list[object] = []
    by_shifts = convolutions.by_shifts
    monkeypatch.setattr(
        "torchtrim.runner.perturbed.by_shifts",
        lambda func, args: called.append(func) or by_shifts(func, args),
    )
    rng = random.Random(number)
    torch.manual_seed(number)
    count = rng.randint(1, 3)
    settings = {
        "stride": [rng.randint(1, 3) for _ in range(count)],
        "padding": [rng.randint(0, 2) for _ in range(count)],
        "dilation": [rng.randint(1, 2) for _ in range(count)],
    }
    sizes = [rng.randint(1, 3) for _ in range(count - 1)] + [2]
    shape = rng.randint(1, 3), rng.randint(1, 3), *(rng.randint(5, 8) for _ in range(count))
    x = torch.randn(shape, dtype=torch.float64)
    x = (x.transpose(0, 1).contiguous().transpose(0, 1) if number % 2 else x).requires_grad_()
    weight = torch.randn(3, shape[1], *sizes, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True) if number % 3 else None
    wanted = [one for one in (x, weight, bias) if one is not None]

    def run() -> list[torch.Tensor]:
        out = getattr(F, f"conv{count}d")(x, weight, bias, **settings)
        return [out, *torch.autograd.grad(out.square().sum(), wanted)]

    plain = run()
    with Perturbed(0):
        found = run()
    assert len(called) == 2
    torch.testing.assert_close(found, plain, rtol=1e-11, atol=1e-11)
