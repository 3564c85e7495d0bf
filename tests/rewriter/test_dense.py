"""Names of selections that only one expression reads."""

from __future__ import annotations

import ast

import pytest

from torchtrim.rewriter.dense import named_values
from torchtrim.source.source import SourceFile


def named(body: str) -> list[str]:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = SourceFile("case.py", f"import torch\ndef function(x, y, m):\n{lines}")
    last = source.tree.body[-1].body[-1]  # type: ignore[attr-defined]
    assert isinstance(last, ast.Return)
    assert last.value is not None
    return sorted(named_values(source, last.value))


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("p = x[m]\nreturn p.sum()", ["p"]),
        ("p = x[m]\nt = y[m]\nd = p - t\nreturn (d * d).sum()", ["d", "p", "t"]),
        ("n = x + 1\np = n[m]\nreturn p.sum()", ["p"]),
        ("p = x[m]\nq = p.exp()\nreturn (p * q).sum()", ["p", "q"]),
        ("p = x[m]\nprint(1)\nreturn p.sum()", []),
        ("p = x[m]\nq = p\nz = p\nreturn q.sum()", []),
        ("p = x[m]\nx = x + 1\nreturn p.sum()", []),
        ("p = x[m]\nx += 1\nreturn p.sum()", []),
        ("p = x[m]\np = p + 1\nreturn p.sum()", []),
        ("if y:\n    p = x[m]\nreturn p.sum()", []),
        ("p = x[m]\nreturn y and p.sum()", ["p"]),
    ],
)
def test_only_what_nothing_changes_between(body: str, names: list[str]) -> None:
    assert named(body) == names
