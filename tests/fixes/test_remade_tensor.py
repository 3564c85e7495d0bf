"""`torch.tensor(loss.item(), device=d)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.given_back import REMADE_TENSOR as FIX
from torchtrim.source.facts import Refused

CALLS = (
    "torch.tensor(x.sum().item(), device=d)",
    "torch.tensor(float(x.mean()), device=d)",
    "torch.tensor(x.max().detach().item()).to(d)",
    "torch.tensor(x.sum().cpu().item(), dtype=torch.float64, device=d)",
)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = tuple(max(1, one) for one in proving.shape(rng))
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    graded = rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.2)))
        yield {"x": x.requires_grad_(graded), "d": rng.choice(("cpu", torch.device("cpu")))}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(x, d):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=65)
    assert proof.reaches(260), proof


def test_integers_keep_their_type() -> None:
    code = "import torch\ndef function(x, d):\n    return torch.tensor(x.item(), device=d)\n"
    (edit,) = proving.fixed(FIX, code, {"x": torch.tensor(3), "d": "cpu"}).edits
    assert "x.detach().to(device=d, dtype=torch.int64, copy=True)" in edit.text
    assert "if x.dim() == 0 and x.dtype == torch.int64" in edit.text


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(x.item(), device=d)", "zero dimensions"),
        ("torch.tensor(float(n), device=d)", "way of another"),
        ("torch.tensor(n.item(), device=x)", "is a device"),
        ("torch.tensor(x[0].item(), dtype=torch.float16, device=d)", "32 or 64 bits"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    inputs = {"x": torch.ones(1), "d": "cpu", "n": torch.tensor(2)}
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"import torch\ndef function(x, d, n):\n    return {call}\n", inputs)


def test_it_waits_no_more() -> None:
    code = (
        "import torch\ndef function(x):\n    return torch.tensor(x.sum().item(), device=x.device)\n"
    )
    assert proving.syncs_go(FIX, code, {"x": torch.ones(3)}) == (2, 0)
