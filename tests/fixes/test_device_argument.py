"""`x.clamp(max=t.item())` and its like."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.given_back import DEVICE_ARGUMENT as FIX
from torchtrim.source.facts import Refused

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = proving.shape(rng), rng.choice(TYPES), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.3))).requires_grad_(graded)
        t = proving.floating(rng, (), dtype, odd=rng.choice((0, 0, 0.5)))
        yield {"x": x, "t": t, "mask": proving.mask(rng, size)}


CALLS = (
    "torch.clamp(x, max=top.item())",
    "x.clamp(min=float(top))",
    "x.masked_fill(mask, top.item())",
    "torch.where(mask, x, top.detach().item())",
    "torch.mul(x, top.item())",
    "x.div(top.item())",
    "(x * 2).clamp_(max=(top * 2).item())",
    "x.add((x * 2).sum().item())",
)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(x, t, mask):\n    top = t * 1\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=34)
    assert proof.reaches(130), proof


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return x.clamp(max=t.item())\n", "may be written to afterwards"),
        ("    t = t.double() * 2\n    return x.clamp(max=t.item())\n", "of the type and device"),
        (
            "    t = t * 2\n    y = x.clamp(max=t.item())\n    t.add_(1)\n    return y\n",
            "written to",
        ),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        proving.fixed(
            FIX, f"def function(x, t):\n{body}", {"x": torch.randn(3), "t": torch.tensor(1.0)}
        )


def test_it_waits_no_more() -> None:
    code = "def function(x):\n    return x.clamp(max=x.abs().mean().item())\n"
    assert proving.syncs_go(FIX, code, {"x": torch.randn(4)}) == (1, 0)
