"""Conditions that become one tensor."""

from __future__ import annotations

import ast
import itertools

import pytest
import torch

from torchtrim.rewriter.truth import as_tensor, operands
from torchtrim.source.source import SourceFile


def written(text: str, numeric: tuple[int, ...] = ()) -> str:
    source = SourceFile("case.py", f"v = {text}\n")
    (assign,) = source.tree.body
    assert isinstance(assign, ast.Assign)
    return as_tensor(assign.value, source, numeric)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "a"),
        ("a > 1", "a > 1"),
        ("a and not b", "a & (~b)"),
        ("a > 1 or b.any()", "(a > 1) | b.any()"),
        ("not (a or b) and c", "(~(a | b)) & c"),
        ("0 < x <= y + 1", "((0) < x) & (x <= (y + 1))"),
    ],
)
def test_operators_of_tensors_stand_for_those_of_python(text: str, expected: str) -> None:
    assert written(text) == expected


CONDITIONS = (
    "a and b or not c",
    "not (a or b) and (c or not a)",
    "not a == b and c",
    "a or b and not (c and a)",
    "0 < x < y or c",
    "not x < y <= 2 and (a or 1 > y)",
    "not not x and y or x >= y",
)


@pytest.mark.parametrize("text", CONDITIONS)
def test_it_is_true_where_the_condition_is(text: str) -> None:
    tree = ast.parse(text, mode="eval").body
    numeric = tuple(
        n
        for n, one in enumerate(operands(tree))
        if isinstance(one.node, ast.Name) and one.node.id in "xy"
    )
    new = written(text, numeric)
    for a, b, c in itertools.product((False, True), repeat=3):
        for x, y in itertools.product((-1.0, 0.0, 1.0, 2.0, float("nan")), repeat=2):
            plain = {"a": a, "b": b, "c": c, "x": x, "y": y}
            tensors = {name: torch.tensor(value) for name, value in plain.items()}
            found = eval(new, {}, tensors)
            assert found.dtype == torch.bool
            assert bool(found) == bool(eval(text, {}, plain)), (new, plain)
