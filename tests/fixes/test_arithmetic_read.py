"""`loss / n.item()`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.arithmetic_read import FIX
from torchtrim.source.facts import Refused
from torchtrim.source.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = proving.shape(rng), rng.choice(TYPES[:2]), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.3))).requires_grad_(graded)
        yield {"x": x, "mask": proving.mask(rng, size)}


BODIES = {
    "normaliser": "    return x.square().sum() / max(mask.sum().item(), 1)\n",
    "named": """
    count = mask.sum()
    n = max(1.0, count.item())
    loss = -x / n
    return loss, (x * 2) / n, count + 0
""",
    "scale": """
    top = x.detach().abs().sum()
    return (x * top.item()) + 0
""",
    "norm": """
    norm = x.norm()
    scale = float(norm)
    return scale * x
""",
    "floor": "    return x / max(x.abs().sum().item(), 1e-8)\n",
    "ceiling": "    return x * min((x * x).sum().item(), 2.5)\n",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, f"def function(x, mask):\n{body}", make, structures=45)
    assert proof.reaches(150), proof


@pytest.mark.parametrize("dtype", TYPES)
def test_types_are_kept(dtype: torch.dtype) -> None:
    def typed(rng: random.Random) -> Iterator[proving.Inputs]:
        size, other = proving.shape(rng, least=0), rng.choice((*TYPES, torch.int64, torch.bool))
        for _ in range(proving.DRAWS):
            n = proving.integral(rng, (), torch.int64, 1, 70000).to(other)
            yield {"x": proving.floating(rng, size, dtype), "n": n}

    code = "def function(x, n):\n    n = n.clone()\n    return x * n.item()\n"
    proof = proving.prove(FIX, code, typed, structures=40)
    assert proof.reaches(20), proof


@pytest.mark.parametrize(
    "body",
    [
        "    return [0] * n.item()\n",
        "    return 1 / n.item()\n",
        "    return x.view(n.item(), -1)\n",
        "    print(n.item())\n",
        "    k = n.item()\n    return k\n",
    ],
)
def test_what_needs_a_number_is_no_match(body: str) -> None:
    assert not list(FIX.find(Source("case.py", f"def f(x, n):\n{body}")))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return x / n.item()\n", "may be written to afterwards"),
        (
            "    n = n + 0\n    k = n.item()\n    n += 1\n    return x / k\n",
            "may be written to afterwards",
        ),
        ("    n = n * 1.5\n    return x * max(1, n.item())\n", "comes first"),
        ("    n = n * 1.5\n    return x * int(n)\n", "is of integers"),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        proving.fixed(
            FIX, f"def function(x, n):\n{body}", {"x": torch.randn(3), "n": torch.tensor(3)}
        )


def test_it_waits_no_more() -> None:
    code = f"def function(x, mask):\n{BODIES['named']}"
    inputs = {"x": torch.randn(4, 5), "mask": torch.ones(4, 5, dtype=torch.bool)}
    assert proving.syncs_go(FIX, code, inputs) == (1, 0)
