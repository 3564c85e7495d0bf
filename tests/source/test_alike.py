"""Expressions of one form agree in type, shape, gradient and in what raises, for all inputs."""

from __future__ import annotations

import ast
import itertools

import pytest
import torch

from torchtrim.source.alike import common_form
from torchtrim.source.source import Source

SOURCE = Source("case.py", "import torch\n")
WAYS = """
x; x * 2; x * 3; x + 1; x - 1; 2 - x; 3 - x; x * 0.5; 0.5 - x; x / 2; 2 / x; x * 2 * 0.5; -x
-(x * 2); x.exp(); torch.sqrt(x); x.clone(); x * x; x + x; x - x; x.detach() * 2
torch.zeros_like(x); torch.ones_like(x); torch.ones_like(x, dtype=torch.float32); x + y; y + x
x * y; x - y; y - x; x / y; y / x; x * 2 + y; (x + y) * 2; x * 0.5 - y; y - x * 2
torch.zeros_like(y); x.sum(); x.sum() * 2; x.mean(); x * 300; x + 2; x @ y; x @ y * 2; x > 0
torch.zeros_like(x) + y; torch.zeros_like(x) - y; -x * 2; x.tanh() * 2; torch.log(x) + 1; 1 - x * 2
""".replace("\n", ";")
TEXTS = sorted({text.strip() for text in WAYS.split(";")} - {""})
TYPE_NAMES = "bool uint8 int8 int32 int64 float16 bfloat16 float32 float64 complex64"
TYPES = TYPE_NAMES.split()
SHAPES = ((), (3,), (2, 3))

Given = tuple[object, ...]


def _given(text: str, x: torch.Tensor, y: torch.Tensor) -> Given:
    try:
        result = eval(text, {"torch": torch, "x": x, "y": y})
    except (RuntimeError, TypeError):
        return ("raises",)
    return result.dtype, result.shape, result.requires_grad, _reached(result, x, y)


def _reached(result: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Given:
    leaves = [one for one in (x, y) if one.requires_grad]
    if not result.requires_grad:
        return tuple(False for _ in leaves)
    ones = torch.ones_like(result)
    found = torch.autograd.grad(result, leaves, ones, allow_unused=True)
    return tuple(one is not None for one in found)


def _inputs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = []
    for one, other in itertools.product(TYPES, repeat=2):
        for number, shape in enumerate(SHAPES):
            x = torch.ones(shape, dtype=getattr(torch, one))
            y = torch.ones(
                SHAPES[number - 1 if one < other else number], dtype=getattr(torch, other)
            )
            graded = [z for z in (x, y) if z.is_floating_point()]
            made.append((x, y))
            for z in graded:
                z.requires_grad_()
    return made


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_has_one_form_agrees() -> None:
    pairs = [
        pair
        for pair in itertools.combinations(TEXTS, 2)
        if common_form(*(ast.parse(one, mode="eval").body for one in pair), SOURCE) is not None
    ]
    assert len(pairs) > 40
    inputs = _inputs()
    given = {
        text: [_given(text, x, y) for x, y in inputs] for text in {one for p in pairs for one in p}
    }
    wrong = {
        pair: next(
            f"{a} {b}" for a, b in zip(given[pair[0]], given[pair[1]], strict=True) if a != b
        )
        for pair in pairs
        if given[pair[0]] != given[pair[1]]
    }
    assert not wrong, "\n".join(f"{pair}: {how}" for pair, how in wrong.items())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("torch.ones_like(n, dtype=torch.float32)", "n / d"),
        ("torch.ones_like(n)", "n * 0.5"),
        ("torch.zeros_like(n)", "n * 1"),
        ("n.detach()", "n.clone()"),
        ("a * m", "torch.zeros_like(a)"),
        ("a @ m", "a * 2"),
        ("x / 2", "x * 2"),
        ("x.sum()", "x.mean()"),
        ("x.view(2, 3)", "x * 1"),
        ("x.float() * 2", "x * 2"),
    ],
)
def test_what_may_differ_has_no_common_form(one: str, other: str) -> None:
    ways = [ast.parse(text, mode="eval").body for text in (one, other)]
    assert common_form(*ways, SOURCE) is None
