"""`torch.tensor([0.0 for _ in range(n)], device=d)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.uploads import REPEATED_NUMBER as FIX
from torchtrim.source.facts import Refused

CALLS = (
    "torch.tensor([0.5 for _ in range(n)], device=d)",
    "torch.tensor([1 for i in range(n + 1)], dtype=torch.long, device=d)",
    "torch.tensor([0.0 for i in range(n)]).to(d)",
    "torch.tensor(n * [3], device=d, dtype=torch.float32)",
)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {"n": rng.choice((-2, 0, 1, 5)), "d": rng.choice(("cpu", torch.device("cpu")))}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(n, d):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=65)
    assert proof.reaches(260), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor([1 for _ in range(n)], device=d)", "give `dtype`"),
        ("torch.tensor([n for _ in range(n)], device=d)", "written there"),
        ("torch.tensor([0.5 for _ in range(n)]).to(x)", "is a device"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    code = f"import torch\ndef function(n, d, x):\n    return {call}\n"
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, code, {"n": 2, "d": "cpu", "x": torch.ones(2)})


def test_it_waits_no_more() -> None:
    call = "torch.tensor([0.5 for _ in range(3)], device=d)"
    code = f"import torch\ndef function(x):\n    d = x.device\n    return x + {call}\n"
    assert proving.syncs_go(FIX, code, {"x": torch.ones(3)}) == (1, 0)
