"""`torch.tensor(list(range(n)), device=d)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.uploads import LISTED_RANGE as FIX
from torchtrim.source.facts import Refused

SAFE = (
    "torch.tensor(list(range(n)), dtype=torch.long, device=d)",
    "torch.tensor(range(n * 2), device=d, dtype=torch.int32)",
    "torch.tensor([i for i in range(n)], dtype=torch.int64, device=d)",
)
ASKED = ("torch.tensor(list(range(n)), device=d)", "torch.as_tensor(range(n), device=d)")


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {"n": rng.choice((-2, 0, 1, 7)), "d": rng.choice(("cpu", torch.device("cpu")))}


def make_some(rng: random.Random) -> Iterator[proving.Inputs]:
    return ({**one, "n": abs(one["n"]) + 1} for one in make(rng))


@pytest.mark.parametrize("call", SAFE)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(n, d):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=85)
    assert proof.reaches(340), proof


@pytest.mark.parametrize("call", ASKED)
def test_without_a_type_it_is_the_same_where_there_is_one_and_never_safe(call: str) -> None:
    code = f"import torch\ndef function(n, d):\n    return {call}\n"
    proof = proving.prove(FIX, code, make_some, structures=85, suggested=True)
    assert proof.reaches(340), proof
    assert not proving.prove(FIX, code, make_some, structures=2).agreed


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(range(x), device=d)", "is an integer"),
        ("torch.tensor(range(3)).to(x)", "is a device"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    code = f"import torch\ndef function(d, x):\n    return {call}\n"
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, code, {"d": "cpu", "x": torch.tensor(2)})


def test_it_waits_no_more() -> None:
    call = "torch.tensor(list(range(3)), dtype=torch.long, device=d)"
    code = f"import torch\ndef function(x):\n    d = x.device\n    return x + {call}\n"
    assert proving.syncs_go(FIX, code, {"x": torch.ones(3)}) == (1, 0)
