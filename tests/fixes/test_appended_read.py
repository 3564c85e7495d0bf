"""`losses.append(loss.item())`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.deferred_reads import APPENDED_READ as FIX
from torchtrim.source.facts import Refused

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HEAD = "import torch\nimport numpy as np\ndef function(x, n):\n"


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    dtype, width, graded = rng.choice(TYPES), rng.randint(1, 4), rng.random() < 0.5
    for draw in range(proving.DRAWS):
        rows = rng.choice((0, 1, 3, 6)) if draw else rng.choice((1, 4))
        x = proving.floating(rng, (rows, width), dtype, odd=rng.choice((0, 0.2)))
        yield {"x": x.requires_grad_(graded), "n": rng.choice((1, 3))}


BODIES = {
    "losses": """
    losses = []
    for row in x:
        loss = row.square().mean()
        losses.append(loss.item())
        loss.data.zero_()  # changed afterwards
    return losses
""",
    "epochs": """
    losses = [0.5]
    same = losses[0]
    for epoch in range(n):
        for row in x:
            losses.append(float(row.sum()))
    return losses, sum(losses), same
""",
    "read between": """
    history, means = list(), []
    for epoch in range(n):
        for row in x:
            history.append(100.0 * row.mean().item() / 7)
        means.append(np.mean(history) if len(history) else 0.0)
    return history
""",
    "counts": """
    counts = []
    for row in x:
        counts.append((row > 0).sum().item())
        if len(row) > 3:
            continue
    return counts
""",
    "one element": """
    losses = []
    for row in x:
        losses.append(row.sum(0, keepdim=True).item())
    return losses
""",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, HEAD + body, make, structures=52)
    assert proof.reaches(200), proof


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    for v in x:\n        n.losses.append(v.item())\n", "looked at by others"),
        ("    for v in x:\n        n.append(v.item())\n    return n\n", "is an argument"),
        (
            "    t = n.get()\n    for v in x:\n        t.append(v.item())\n    return t\n",
            "not made there",
        ),
        (
            "    t = []\n    n.all = t\n    for v in x:\n        t.append(v.item())\n",
            "may keep `t`",
        ),
        (
            "    t = []\n    for v in x:\n        t.append(v.item())\n        n.log(t)\n    return t\n",
            "before the loop is over",
        ),
        ("    for v in x:\n        t = []\n        t.append(v.item())\n", "begins anew"),
        (
            "    t = []\n    for _ in x:\n        for v in x:\n            t.append(v.item())\n"
            "        n.all = t\n",
            "may keep `t`",
        ),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"def function(x, n):\n{body}", {"x": torch.randn(3), "n": None})


def test_it_waits_once() -> None:
    inputs = {"x": torch.randn(5, 2), "n": 1}
    assert proving.syncs_go(FIX, HEAD + BODIES["losses"], inputs) == (5, 1)
