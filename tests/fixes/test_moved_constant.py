"""`self.table.to(device)` in each call."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.constants import MOVED_CONSTANT as FIX
from torchtrim.source.facts import Refused

HEAD = """
import torch

class Encoding(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.freqs = torch.arange(n).float() + 0.5

    def forward(self, x):
"""
TAIL = """
def function(x, n):
    module = Encoding(n)
    first = module(x)
    return first + 0, module(x), list(module.state_dict())
"""


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    n = rng.randint(0, 4)
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, (2, n), torch.float32, odd=0.2)
        yield {"x": x.requires_grad_(rng.random() < 0.5), "n": n}


BODIES = {
    "used at once": "        return x * self.freqs.to(x.device)\n",
    "named": """
        freqs = self.freqs.to(device=x.device)  # not a buffer
        return x * freqs[None] + freqs.cos()
""",
    "in a call": "        return torch.mul(x, self.freqs.to(x.device))\n",
    "not waiting": "        return x - self.freqs.to(x.device, non_blocking=True)\n",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, HEAD + body + TAIL, make, structures=64)
    assert proof.reaches(256), proof


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("        return self.freqs.to(x.device)\n", "kept or written to"),
        (
            "        freqs = self.freqs.to(x.device)\n        freqs += 1\n        return x\n",
            "kept or written",
        ),
        ("        return x * self.freqs.to(x.device) + len(self.freqs)\n", "in another way"),
        (
            "        self.freqs = torch.ones(3)\n        return x * self.freqs.to(x.device)\n",
            "in another way",
        ),
        ("        return x * self.freqs.to(x.dtype)\n", "is a device"),
        (
            "        import copy\n        return x * self.freqs.to(x.device)\n",
            "take the moved constant along",
        ),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, HEAD + body + TAIL, {"x": torch.ones(2, 3), "n": 3})


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ('self.register_buffer("freqs", torch.ones(3))', "named in a text"),
        ("self.freqs = torch.nn.Parameter(torch.ones(3))", "no parameter"),
    ],
)
def test_what_the_module_moves_is_refused(made: str, reason: str) -> None:
    code = (HEAD + BODIES["used at once"] + TAIL).replace(
        "self.freqs = torch.arange(n).float() + 0.5", made
    )
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, code, {"x": torch.ones(2, 3), "n": 3})


def test_it_waits_once() -> None:
    code = HEAD + BODIES["used at once"] + TAIL
    assert proving.syncs_go(FIX, code, {"x": torch.ones(2, 3), "n": 3}) == (2, 1)
