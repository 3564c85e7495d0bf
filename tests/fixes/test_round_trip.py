"""`torch.from_numpy(x.cpu().numpy()).to(d)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.given_back import ROUND_TRIP as FIX
from torchtrim.source.facts import Refused

TYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool)
CALLS = (
    "torch.from_numpy(x.detach().cpu().numpy()).to(d) + 1",
    "torch.tensor(x.detach().cpu().numpy(), device=d)",
    "torch.as_tensor((x * 1).cpu().detach().numpy(), device=d)",
)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = proving.shape(rng, least=0), rng.choice(TYPES), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        odd = rng.choice((0, 0.3)) if dtype.is_floating_point else 0
        x = proving.floating(rng, size, torch.float32, odd=odd).to(dtype)
        yield {"x": x.requires_grad_(graded and dtype.is_floating_point), "d": "cpu"}


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(x, d):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=85)
    assert proof.reaches(340), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(n.cpu().numpy(), device=d)", "NumPy can hold"),
        ("torch.from_numpy(x.cpu().numpy()).to(torch.float64)", "is a device"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    code = (
        "import torch\nclass N:\n    cpu = lambda self: self\n    numpy = lambda self: [1.0]\n"
        f"def function(x, d):\n    n = N()\n    return {call}\n"
    )
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, code, {"x": torch.ones(2), "d": "cpu"})


def test_it_waits_no_more() -> None:
    call = "torch.tensor(x.cpu().numpy(), device=x.device)"
    code = f"import torch\ndef function(x):\n    return {call}\n"
    before, after = proving.syncs_go(FIX, code, {"x": torch.ones(3)})
    assert before == 2
    assert after == 0
