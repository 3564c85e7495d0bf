"""Fixes of scalars that are read for arithmetic or a comparison."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.scalar_arithmetic import ARITHMETIC_READ, COMPARED_EXTREME

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")
ARITHMETIC_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make_arithmetic(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = (proving.shape(rng), rng.choice(ARITHMETIC_TYPES[:2]), rng.random() < 0.5)
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.3))).requires_grad_(graded)
        yield {"x": x, "mask": proving.mask(rng, size)}


ARITHMETIC_BODIES = {
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


@pytest.mark.parametrize("body", ARITHMETIC_BODIES.values(), ids=ARITHMETIC_BODIES)
def test_arithmetic_read_is_sound(body: str) -> None:
    assert proving.prove(
        ARITHMETIC_READ, f"def function(x, mask):\n{body}", make_arithmetic, structures=45
    ).reaches(150)


@pytest.mark.parametrize("dtype", ARITHMETIC_TYPES)
def test_types_are_kept(dtype: torch.dtype) -> None:
    def typed(rng: random.Random) -> Iterator[proving.Inputs]:
        size, other = (
            proving.shape(rng, least=0),
            rng.choice((*ARITHMETIC_TYPES, torch.int64, torch.bool)),
        )
        for _ in range(proving.DRAWS):
            n = proving.integral(rng, (), torch.int64, 1, 70000).to(other)
            yield {"x": proving.floating(rng, size, dtype), "n": n}

    code = "def function(x, n):\n    n = n.clone()\n    return x * n.item()\n"
    assert proving.prove(ARITHMETIC_READ, code, typed, structures=40).reaches(20)


@pytest.mark.parametrize(
    "body",
    [
        "return [0] * n.item()",
        "return 1 / n.item()",
        "return x.view(n.item(), -1)",
        "print(n.item())",
        "k = n.item()\nreturn k",
    ],
)
def test_what_needs_a_number_is_no_match(body: str) -> None:
    assert not proving.matches(ARITHMETIC_READ, proving.code_of("def f(x, n):\n", body))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return x / n.item()", "may be written to afterwards"),
        ("n = n + 0\nk = n.item()\nn += 1\nreturn x / k", "may be written to afterwards"),
        ("n = n * 1.5\nreturn x * max(1, n.item())", "comes first"),
        ("n = n * 1.5\nreturn x * int(n)", "is an integer tensor"),
    ],
)
def test_arithmetic_read_is_refused(body: str, reason: str) -> None:
    proving.refuses(
        ARITHMETIC_READ,
        proving.code_of("def function(x, n):\n", body),
        {"x": torch.randn(3), "n": torch.tensor(3)},
        reason,
    )


def test_arithmetic_read_waits_no_more() -> None:
    code = f"def function(x, mask):\n{ARITHMETIC_BODIES['named']}"
    inputs = {"x": torch.randn(4, 5), "mask": torch.ones(4, 5, dtype=torch.bool)}
    assert proving.syncs_go(ARITHMETIC_READ, code, inputs) == (1, 0)


EXTREME_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
EXTREME_BODIES = (
    "return max(a.sum(), b.sum()) * 2",
    "return min(a.max(), b.mean()) + 1",
    "low = a.sum() * 1\nreturn min(low, b.sum()) / 3",
    "with torch.no_grad():\n    return max(a.min(), b.min()) - a",
)


def make_extreme(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng, least=1), rng.choice(EXTREME_TYPES)
    size = tuple(max(1, one) for one in size)
    for _ in range(proving.DRAWS):
        odd = rng.choice((0, 0.3)) if dtype.is_floating_point else 0
        a, b = (proving.floating(rng, size, torch.float32, odd=odd) for _ in range(2))
        if not dtype.is_floating_point:
            a, b = a.nan_to_num(), b.nan_to_num()
        yield {"a": a.to(dtype), "b": b.to(dtype)}


@pytest.mark.parametrize("body", EXTREME_BODIES)
def test_compared_extreme_is_sound(body: str) -> None:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"import torch\ndef function(a, b):\n{lines}"
    proof = proving.prove(COMPARED_EXTREME, code, make_extreme, structures=72)
    assert proof.agreed + sum(proof.refused.values()) >= 4
    assert proof.reaches(190), proof


def make_counted(rng: random.Random) -> Iterator[proving.Inputs]:
    for one in make_arithmetic(rng):
        yield {**one, "n": one["mask"].sum()}


@pytest.mark.parametrize(
    "body",
    [
        "return x.sum() / max(1, n)",
        "return x * max(mask.sum(), 2)",
        "total = min(n, 3)\n    return x / total",
    ],
)
def test_a_bounded_count_is_sound(body: str) -> None:
    code = f"import torch\ndef function(x, mask, n):\n    {body}\n"
    assert proving.prove(COMPARED_EXTREME, code, make_counted, structures=84).reaches(300)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return max(a, 0) * 2", "an integer tensor"),
        ("return max(a.long(), 0)", "needed as a Python number"),
        ("c = a.sum().requires_grad_() * 1\n    return max(c, b.sum()) * 2", "no gradient"),
        ("return max(a, b.sum()) * 2", "may be written to"),
        ("d = max(a.sum(), b.sum())\n    return d", "may be written to"),
    ],
)
def test_compared_extreme_is_refused(body: str, reason: str) -> None:
    inputs = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
    proving.refuses(COMPARED_EXTREME, f"def function(a, b):\n    {body}\n", inputs, reason)


def test_another_max_is_refused() -> None:
    code = "from torch import max\ndef function(a, b):\n    return max(a.sum(), b.sum()) * 2\n"
    proving.refuses(
        COMPARED_EXTREME, code, {"a": torch.ones(1), "b": torch.ones(1)}, "not the Python builtin"
    )


def test_compared_extreme_waits_no_more() -> None:
    code = "import torch\ndef function(a, b):\n    return max(a.sum(), b.sum()) * 2\n"
    assert proving.syncs_go(COMPARED_EXTREME, code, {"a": torch.ones(2), "b": torch.ones(2)}) == (
        1,
        0,
    )
