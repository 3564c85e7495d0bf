"""`x.new_tensor(0.5)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.uploads import NEW_NUMBER as FIX
from torchtrim.source.facts import Refused

CALLS = (
    "x.new_tensor(0.5)",
    "x.new_tensor(-3)",
    "x.new_tensor(7, dtype=torch.int32)",
    "(x + 1).new_tensor(0.1, requires_grad=True) * x",
)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype)}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(x):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=65)
    assert proof.reaches(260), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("x.new_tensor(n)", "written there"),
        ("x.new_tensor([1.0])", "written there"),
        ("x.new_tensor(1e30)", "small number"),
        ("x.new_tensor(True)", "small number"),
        ("x.long().new_tensor(3)", "tensor of floats"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        proving.fixed(
            FIX, f"def function(x, n):\n    return {call}\n", {"x": torch.ones(2), "n": 1.0}
        )


def test_it_waits_no_more() -> None:
    code = "def function(x):\n    return x + x.new_tensor(0.5)\n"
    assert proving.syncs_go(FIX, code, {"x": torch.ones(2)}) == (1, 0)
