"""`torch.zeros(n).to(d)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.uploads import MADE_ON_DEVICE as FIX
from torchtrim.source.facts import Refused


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {
            "n": rng.choice((0, 1, 5)),
            "m": rng.choice((1, 4)),
            "c": rng.choice((0.5, -1.0)),
            "d": rng.choice(("cpu", torch.device("cpu"))),
            "t": rng.choice((torch.float16, torch.int64, torch.bfloat16)),
        }


CALLS = (
    "torch.zeros(n, m).to(d)",
    "torch.ones((n, m), dtype=t).bool().to(d, non_blocking=True)",
    "torch.arange(n).view(1, -1).to(device=d)",
    "torch.arange(0, (n), dtype=t).to(d)",
    "torch.full((n,), c).unsqueeze(0).half().to(d)",
    "torch.eye(\n        n,  # rows\n    ).to(d)",
    "torch.zeros(()).to(d) + n",
    "torch.zeros(*[n, m]).to(d)",
)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(n, m, c, d, t):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=33)
    assert proof.reaches(132), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.randn(n).to(d)", "random numbers"),
        ("torch.linspace(0, 1, n).to(d)", "round its steps"),
        ("torch.arange(0, c).to(d)", "is an integer"),
        ("torch.zeros(n, requires_grad=True).to(d)", "gradient before it is moved"),
        ("torch.ones(n).exp().to(d)", "computed of it on the host"),
        ("torch.zeros(n).to(torch.float16)", "is a device"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    inputs = next(make(random.Random(0)))
    with pytest.raises(Refused, match=reason):
        proving.fixed(
            FIX, f"import torch\ndef function(n, m, c, d, t):\n    return {call}\n", inputs
        )


def test_it_waits_no_more() -> None:
    code = "import torch\ndef function(x):\n    return x + torch.arange(len(x)).to(x.device)\n"
    assert proving.syncs_go(FIX, code, {"x": torch.randn(4)}) == (1, 0)
