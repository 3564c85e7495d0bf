"""`torch.tensor(list, device=d)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.uploads import PINNED_UPLOAD as FIX
from torchtrim.source.facts import Refused


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    numbers = rng.choice(((0, 1, 2), (0.5, -0.0, float("nan")), (True, False)))
    for _ in range(proving.DRAWS):
        found = [rng.choice(numbers) for _ in range(rng.choice((0, 1, 4)))]
        yield {"found": found, "d": rng.choice(("cpu", torch.device("cpu")))}


CALLS = (
    "torch.tensor(found, device=d)",
    "torch.tensor(found).to(d)",
    "torch.tensor(found, dtype=torch.float16, device=d)",
    "torch.tensor([len(one) for one in [found, found]], device=d)",
    "torch.tensor([0.485, 0.456, 0.406]).to(device=d, non_blocking=True)",
    "torch.tensor([found, found], device=d)",
)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(found, d):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=42)
    assert proof.reaches(168), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(x, device=d)", "is a list"),
        ("torch.tensor([1.0], requires_grad=True, device=d)", "gradient"),
        ("torch.tensor([1.0]).to(torch.float16)", "is a device"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    inputs = {"x": 3, "d": "cpu"}
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"import torch\ndef function(x, d):\n    return {call}\n", inputs)


def test_it_waits_no_more() -> None:
    code = "import torch\ndef function(x):\n    return x[0] + torch.tensor([1, 2, 3], device=x.device)\n"
    assert proving.syncs_go(FIX, code, {"x": torch.randn(4, 3)}) == (1, 0)
