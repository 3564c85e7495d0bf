"""Readers and writers of a name's value."""

from __future__ import annotations

import ast

import pytest

from torchtrim.source.names import (
    is_fresh_name,
    is_private,
    is_unshared,
    literal_stores,
    loads,
    only_reads,
)
from torchtrim.source.source import SourceFile


def function_of(text: str) -> tuple[SourceFile, ast.FunctionDef]:
    source = SourceFile("case.py", f"import torch\ndef f(a, b):\n    {text}\n")
    found = source.tree.body[-1]
    assert isinstance(found, ast.FunctionDef)
    return source, found


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("x = 1; y = x", True),
        ("x = 1; g = lambda: x", False),
        ("x = 1; g = lambda x: x", True),
        ("global x; x = 1", False),
        ("x = 1; locals()", False),
        ("x = [x for x in a]", True),
    ],
)
def test_a_name_is_private(text: str, private: bool) -> None:
    source, function = function_of(text)
    assert is_private(source, function, "x") is private


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("return x + 1", True),
        ("return x.sum()", True),
        ("return x.view(-1).sum()", True),
        ("return a.mul(x)", True),
        ("return torch.add(a, other=x)", True),
        ("print(len(x), x.shape)", True),
        ("return x", False),
        ("y = x", False),
        ("y = x.view(-1)", False),
        ("x.add_(1)", False),
        ("x[0] = 1", False),
        ("return x[0]", False),
        ("work(x)", False),
        ("self.work(x)", False),
        ("torch.add(a, a, out=x)", False),
        ("torch.reshape(x, (1,)).add_(1)", False),
        ("y = [x]", False),
    ],
)
def test_a_use_only_reads(text: str, reads: bool) -> None:
    source, function = function_of(text)
    assert all(only_reads(source, use) for use in loads(function, "x")) is reads


@pytest.mark.parametrize(
    ("text", "fresh"),
    [
        ("x = a * 2; x = x", True),
        ("x = a.view(-1); x = x", False),
        ("x = a; x = x", False),
        ("x = a.exp(); b.x = x; x = x", False),
        ("x = a.exp(); y = x.view(1); x = x", False),
        ("x = a.exp(); x += 1; x = x", False),
        ("x = a.relu(inplace=True); x = x", False),
        ("x = work(a); x = x", False),
        ("x = torch.nn.functional.dropout(a); x = x", False),
    ],
)
def test_a_name_was_fresh(text: str, fresh: bool) -> None:
    source, function = function_of(text.replace("; ", "\n    "))
    assert is_fresh_name(source, "x", function.body[-1]) is fresh


def test_what_is_bound_in_an_outer_loop_is_not_fresh_within() -> None:
    source, function = function_of("x = a * 2\n    for i in b:\n        x = x")
    loop = function.body[-1]
    assert isinstance(loop, ast.For)
    assert is_fresh_name(source, "x", loop)
    assert not is_fresh_name(source, "x", loop.body[0])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 0.0; x += a", [0.0]),
        ("x = y = 0", [0]),
        ("x, y = 0, 1.5", [0]),
        ("x: float = 2.0", [2.0]),
        ("x = True", None),
        ("x = a", None),
        ("for x in a: pass", None),
        ("x = 0; del x", None),
        ("(x := 3)", None),
    ],
)
def test_numbers_that_a_name_is_given(text: str, found: list[float] | None) -> None:
    source, function = function_of(text)
    stored = literal_stores(source, function, "x")
    assert (stored if stored is None else [one.value for one in stored]) == found


def test_what_is_written_to_later_does_not_stay() -> None:
    source, function = function_of("x = a * 2\n    y = x\n    x.add_(1)")
    name = loads(function, "x")[0]
    assert not is_unshared(source, name, function.body[1])
