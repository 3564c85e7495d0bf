"""Python's `max(a, b)` of tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.compared_extreme import FIX
from torchtrim.source.facts import Refused

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
BODIES = (
    "return max(a.sum(), b.sum()) * 2",
    "return min(a.max(), b.mean()) + 1",
    "low = a.sum() * 1\nreturn min(low, b.sum()) / 3",
    "with torch.no_grad():\n    return max(a.min(), b.min()) - a",
)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng, least=1), rng.choice(TYPES)
    size = tuple(max(1, one) for one in size)
    for _ in range(proving.DRAWS):
        odd = rng.choice((0, 0.3)) if dtype.is_floating_point else 0
        a, b = (proving.floating(rng, size, torch.float32, odd=odd) for _ in range(2))
        if not dtype.is_floating_point:
            a, b = a.nan_to_num(), b.nan_to_num()
        yield {"a": a.to(dtype), "b": b.to(dtype)}


@pytest.mark.parametrize("body", BODIES)
def test_it_is_sound(body: str) -> None:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"import torch\ndef function(a, b):\n{lines}"
    proof = proving.prove(FIX, code, make, structures=72)
    assert proof.agreed + sum(proof.refused.values()) >= 4
    assert proof.reaches(190), proof


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return max(a, 0) * 2", "both are tensors"),
        ("c = a.sum().requires_grad_() * 1\n    return max(c, b.sum()) * 2", "no gradient"),
        ("return max(a, b.sum()) * 2", "may be written to"),
        ("d = max(a.sum(), b.sum())\n    return d", "may be written to"),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    inputs = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"def function(a, b):\n    {body}\n", inputs)


def test_another_max_is_refused() -> None:
    code = "from torch import max\ndef function(a, b):\n    return max(a.sum(), b.sum()) * 2\n"
    with pytest.raises(Refused, match="not Python's own"):
        proving.fixed(FIX, code, {"a": torch.ones(1), "b": torch.ones(1)})


def test_it_waits_no_more() -> None:
    code = "import torch\ndef function(a, b):\n    return max(a.sum(), b.sum()) * 2\n"
    assert proving.syncs_go(FIX, code, {"a": torch.ones(2), "b": torch.ones(2)}) == (1, 0)
