"""`[int(v) for v in x]`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.loop_reads import ITERATED_READ as FIX
from torchtrim.source.facts import Refused
from torchtrim.source.source import Source

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    dtype = rng.choice(TYPES)
    for _ in range(proving.DRAWS):
        size = (rng.choice((0, 1, 5)),)
        x = proving.floating(rng, size, dtype) if dtype.is_floating_point else None
        yield {"x": proving.integral(rng, size, dtype, 0, 3) if x is None else x}


BODIES = {
    "int": "    return [int(v) for v in x]\n",
    "item": "    return {v.item() for v in x.flatten() if v.item() > 0}\n",
    "sum": "    return sum(float(v) for v in x), max((v for v in [1, 2]))\n",
    "loop": """
    out, n = [], 0
    for v in x:
        # each of them
        n += 1
        out.append(v.item() * n)
    return out
""",
    "counted": """
    total = 0
    for i, v in enumerate(x):
        total += float(v) * i
    return total
""",
    "text": '    return [f"{v.item()!r:>8}" for v in x]\n',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, f"def function(x):\n{body}", make, structures=44)
    assert proof.reaches(176), proof


@pytest.mark.parametrize(
    "body",
    [
        "    return [v for v in x]\n",
        "    return [v * 2 for v in x]\n",
        "    return [(v.item(), v.grad_fn) for v in x]\n",
        "    return [v.item() for v in zip(x, x)]\n",
    ],
)
def test_what_uses_the_tensors_is_no_match(body: str) -> None:
    assert not list(FIX.find(Source("case.py", f"def f(x):\n{body}")))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return [int(v) for v in x]\n", "tensor of one dimension"),
        ("    for v in x:\n        print(v.item(), end='')\n    return v\n", "used after the loop"),
        ("    return list(w for w in (v.item() for v in x.flatten()))\n", "which may be later"),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    inputs = {"x": torch.ones(1, 1) if "int(v)" in body else torch.ones(2)}
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"def function(x):\n{body}", inputs)


def test_a_function_that_might_write_makes_it_unsafe() -> None:
    code = (
        "def work(v):\n    return v\n\ndef function(x):\n    return [work(v.item()) for v in x]\n"
    )
    assert "might write" in proving.fixed(FIX, code, {"x": torch.ones(2)}).risk


def test_it_waits_once() -> None:
    code = f"def function(x):\n{BODIES['loop']}"
    assert proving.syncs_go(FIX, code, {"x": torch.ones(4)}) == (4, 1)
