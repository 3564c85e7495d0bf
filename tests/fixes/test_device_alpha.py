"""`g.sub(w, alpha=p)` with a tensor."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.given_back import DEVICE_ALPHA as FIX
from torchtrim.source.facts import Refused

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng), rng.choice(TYPES)
    for _ in range(proving.DRAWS):
        odd = rng.choice((0, 0.2))
        g = proving.floating(rng, size, dtype, odd=odd).abs() + 1
        w = proving.floating(rng, size, dtype, odd=odd).abs()
        yield {
            "g": g.requires_grad_(rng.random() < 0.5),
            "w": w,
            "p": proving.floating(rng, (), dtype).abs(),
        }


CALLS = (
    "(-g).sub(w, alpha=scale)",
    "torch.add(g, w, alpha=scale)",
    "g.add(w.exp() * 0 + w, alpha=scale.item())",
    "(g * 1).add_(w, alpha=float(scale))",
    "torch.sub(-g, w, alpha=(scale * 2).item())",
)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(g, w, p):\n    scale = p * 1\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=52)
    assert proof.reaches(190), proof


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return g.sub(w, alpha=2)\n", "tensor of zero dimensions"),
        ("    return g.sub(w, alpha=p)\n", "may be written to afterwards"),
        (
            "    p = p.double() * 1\n    return g.sum().sub(w.sum(), alpha=p)\n",
            "of the type of both",
        ),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    inputs = {"g": torch.randn(3), "w": torch.randn(3), "p": torch.tensor(2.0)}
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"def function(g, w, p):\n{body}", inputs)


def test_it_waits_no_more() -> None:
    code = "def function(g, w):\n    p = (g * w).sum()\n    return g.sub(w, alpha=p)\n"
    assert proving.syncs_go(FIX, code, {"g": torch.randn(4), "w": torch.randn(4)}) == (1, 0)
