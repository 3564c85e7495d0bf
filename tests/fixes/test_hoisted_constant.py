"""`weights = torch.tensor([0.1, 0.9], device=d)` in a loop."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.constants import HOISTED_CONSTANT as FIX
from torchtrim.source.facts import Refused

BODIES = (
    """
    out = []
    for row in x:
        w = torch.tensor([0.1, 0.7, 0.2], device=d)
        out.append((row * w).sum())
    return out
""",
    """
    total, n = 0.0, 0
    while n < len(x):
        scale = torch.tensor(2.5).to(d)
        total = total + x[n].sum() * scale
        n += 1
    return total
""",
    """
    found = x
    for a in range(2):
        for b in range(a):
            w = torch.as_tensor([[1.0], [2.0], [0.5]], device=d)
            found = found @ w
    return found
""",
)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    rows, graded = rng.choice((0, 1, 3)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, (max(1, rows), 3), torch.float32)[:rows]
        yield {
            "x": x.detach().requires_grad_(graded),
            "d": rng.choice(("cpu", torch.device("cpu"))),
        }


@pytest.mark.parametrize("body", BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, f"import torch\ndef function(x, d):{body}", make, structures=115)
    assert proof.reaches(280), proof


def test_what_is_written() -> None:
    code = f"import torch\ndef function(x, d):{BODIES[0]}"
    first, second = proving.fixed(FIX, code, {"x": torch.ones(2, 3), "d": "cpu"}).edits
    assert first.text == "    w = torch.tensor([0.1, 0.7, 0.2], device=d)\n"
    assert second.text == ""


REFUSED = [
    ("w = torch.tensor([1.0], device=d)\n        out.append(w)", "written to, or kept"),
    (
        "w = torch.tensor([1.0], device=d)\n        w += 1\n        out.append(w + 1)",
        "another value|written",
    ),
    (
        "w = torch.tensor([1.0], device=d)\n        d = row.device\n        out.append(w + 1)",
        "another in",
    ),
    (
        "w = torch.tensor([1.0], device=row.device)\n        out.append(w + 1)",
        "another in each turn",
    ),
    ("w = torch.tensor([1.0], device=d)", "nothing else in the loop"),
    ("w = torch.tensor([1.0], device=d)  # why\n        out.append(w + 1)", "follows it"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED)
def test_it_is_refused(body: str, reason: str) -> None:
    loop = f"for row in x:\n        {body}"
    code = f"import torch\ndef function(x, d):\n    out = []\n    {loop}\n    return out\n"
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, code, {"x": torch.ones(2, 1), "d": "cpu"})


def test_what_is_read_behind_the_loop_is_refused() -> None:
    loop = "for row in x:\n        w = torch.tensor([1.0], device=d)\n        y = row * w"
    code = f"import torch\ndef function(x, d):\n    {loop}\n    return y + w\n"
    with pytest.raises(Refused, match="behind the loop"):
        proving.fixed(FIX, code, {"x": torch.ones(2, 1), "d": "cpu"})


def test_it_waits_once() -> None:
    code = f"import torch\ndef function(x):\n    d = x.device{BODIES[0]}"
    assert proving.syncs_go(FIX, code, {"x": torch.ones(4, 3)}) == (4, 1)
