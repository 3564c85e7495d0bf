"""`torch.linalg.inv(a)` without its check."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.unchecked import UNCHECKED_INVERSE as FIX
from torchtrim.source.facts import Refused

CALLS = ("torch.linalg.inv(a)", "torch.inverse(a * 1)", "torch.linalg.solve(a, b)")


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, rows = rng.choice(((), (2,), (2, 3))), rng.choice((1, 2, 4))
    dtype, graded = rng.choice((torch.float32, torch.float64)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        a = proving.floating(rng, (*size, rows, rows), dtype) / 8 + 4 * torch.eye(rows, dtype=dtype)
        yield {"a": a.requires_grad_(graded), "b": proving.floating(rng, (*size, rows, 2), dtype)}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_the_same_and_never_safe(call: str) -> None:
    code = f"import torch\ndef function(a, b):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=85, suggested=True)
    assert proof.reaches(340), proof
    assert not proving.prove(FIX, code, make, structures=2).agreed


def test_what_is_no_tensor_of_floats_is_refused() -> None:
    code = "import torch\ndef function(a):\n    return torch.linalg.inv(a)\n"
    with pytest.raises(Refused, match="a tensor of floats"):
        proving.fixed(FIX, code, {"a": torch.eye(2, dtype=torch.complex64)})


@pytest.mark.parametrize("call", CALLS)
def test_it_waits_no_more(call: str) -> None:
    code = f"import torch\ndef function(a, b):\n    return {call}\n"
    inputs = {"a": torch.eye(3), "b": torch.ones(3, 2)}
    assert proving.syncs_go(FIX, code, inputs) == (1, 0)
