"""`torch.linalg.cholesky(a)` without its check."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.unchecked import UNCHECKED_CHOLESKY as FIX
from torchtrim.source.facts import Refused

CALLS = ("torch.linalg.cholesky(a @ a.mT + 1 * e)", "torch.linalg.cholesky(e + e, upper=True)")


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, rows = rng.choice(((), (2,), (2, 3))), rng.choice((1, 2, 4))
    dtype, graded = rng.choice((torch.float32, torch.float64)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        a = proving.floating(rng, (*size, rows, rows), dtype) / 8
        yield {"a": a.requires_grad_(graded), "e": torch.eye(rows, dtype=dtype)}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_the_same_and_never_safe(call: str) -> None:
    code = f"import torch\ndef function(a, e):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=130, suggested=True)
    assert proof.reaches(520), proof
    assert not proving.prove(FIX, code, make, structures=2).agreed


def test_what_is_no_tensor_of_floats_is_refused() -> None:
    code = "import torch\ndef function(e):\n    return torch.linalg.cholesky(e)\n"
    with pytest.raises(Refused, match="a tensor of floats"):
        proving.fixed(FIX, code, {"e": torch.eye(2, dtype=torch.complex64)})


def test_it_waits_no_more() -> None:
    code = "import torch\ndef function(e):\n    return torch.linalg.cholesky(e)\n"
    assert proving.syncs_go(FIX, code, {"e": torch.eye(3)}) == (1, 0)
