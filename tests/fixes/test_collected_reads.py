"""`{k: v.item() for k, v in losses.items()}`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.collected_reads import FIX
from torchtrim.source.facts import Refused

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    dtype, graded = rng.choice(TYPES), rng.random() < 0.5
    for draw in range(proving.DRAWS):
        rows = rng.choice((0, 1, 4)) if draw else rng.choice((1, 4))
        x = proving.floating(rng, (rows, 3), dtype, odd=rng.choice((0, 0.3)))
        yield {"x": x.requires_grad_(graded)}


BODIES = {
    "dictionary": """
    losses = {f"loss_{i}": row.sum() for i, row in enumerate(x)}
    return {name: loss.item() for name, loss in losses.items()}
""",
    "detached": """
    class Owner: pass
    self = Owner()
    self.parts = {i: row.mean() for i, row in enumerate(x)}
    return dict(a={k: v.detach().cpu().item() for k, v in self.parts.items()})
""",
    "list": """
    losses = [row.sum() for row in x]
    return sum([float(v) for v in losses]), len(losses)
""",
    "tuple": "    return [v.item() for v in tuple(row.max() for row in x)]\n",
    "integers": """
    counts = [(row > 0).sum() for row in x]
    return [int(v) for v in counts] + [1]
""",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, f"import torch\ndef function(x):\n{body}", make, structures=52)
    assert proof.reaches(208), proof


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("[x.sum(), x.long().sum()]", "several types"),
        ("[x, x]", "zero dimensions"),
        ("x", "is a list"),
    ],
)
def test_it_is_refused(found: str, reason: str) -> None:
    code = f"def function(x):\n    found = {found}\n    return [v.item() for v in found]\n"
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, code, {"x": torch.ones(1)})


def test_it_waits_once() -> None:
    code = f"import torch\ndef function(x):\n{BODIES['dictionary']}"
    assert proving.syncs_go(FIX, code, {"x": torch.ones(4, 3)}) == (4, 1)
