"""Code that guards keep for other ranks and types."""

from __future__ import annotations

import ast

import pytest

from torchtrim.source.branches import is_fallback
from torchtrim.source.source import SourceFile

TEXT = """\
def f(x, m):
    a = x[m]
    if (x.dim(), m.dim()) == (2, 1):
        b = x * m
    else:
        b = x[m]
    if x.dim() == 2 and x.dtype == torch.float32:
        return c
    d = x[m]
    d = x * m if (x.dim(), m.dim()) == (2, 1) else x[m]
    return d


def g(x, m):
    if x.numel() > 0:
        return x
    e = x[m]
    return e
"""


@pytest.mark.parametrize(
    ("line", "kept"), [(2, False), (4, False), (6, True), (9, True), (10, True), (17, False)]
)
def test_what_a_guard_keeps_is_known(line: int, kept: bool) -> None:
    source = SourceFile("case.py", TEXT)
    (node,) = (assign for assign in source.each(ast.Assign) if assign.lineno == line)
    assert is_fallback(source, node.value) is kept


def test_what_a_conditional_expression_keeps_is_known() -> None:
    source = SourceFile("case.py", "def f(x, m):\n    return x * m if x.dim() == 2 else x[m]\n")
    (choice,) = source.each(ast.IfExp)
    assert is_fallback(source, choice.orelse)
    assert not is_fallback(source, choice.body)
