"""Forms: the nodes that match them, and the expressions that their capitals match."""

from __future__ import annotations

import ast

import pytest

from torchtrim.source.forms import match_form
from torchtrim.source.source import SourceFile

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


def bound(form: str, line: str) -> dict[str, str] | None:
    source = SourceFile("case.py", HEAD + line)
    node: ast.AST = source.tree.body[-1]
    node = node.value if isinstance(node, ast.Expr) else node
    found = match_form(form, node, source)
    if found is None:
        return None
    words = {f"**{k}": ", ".join(map(source.segment, v)) for k, v in found.keywords.items()}
    return {name: source.segment(part) for name, part in found.parts.items()} | words


@pytest.mark.parametrize(
    ("form", "line", "parts"),
    [
        ("X[M.nonzero()] = C", "a.b[m == 1 .nonzero()] = 0", None),
        (
            "X[M.nonzero()] = C",
            "a.b[(m == 1).nonzero()] = 0",
            {"X": "a.b", "M": "m == 1", "C": "0"},
        ),
        ("torch.nn.functional.relu(X)", "F.relu(x + 1)", {"X": "x + 1"}),
        ("torch.nn.functional.relu(X)", "nn.functional.relu(x)", {"X": "x"}),
        ("torch.nn.functional.relu(X)", "relu(x)", None),
        ("torch.nn.functional.relu(X)", "F.relu(x, inplace=True)", None),
        (
            "torch.nn.functional.relu(X, **REST)",
            "F.relu(x, inplace=a)",
            {"X": "x", "**REST": "inplace=a"},
        ),
        ("torch.nn.functional.relu(X, **REST)", "F.relu(x)", {"X": "x", "**REST": ""}),
        ("torch.nn.functional.relu(X, **REST)", "F.relu(x, **more)", None),
        ("torch.nn.functional.relu(X)", "F.relu(*x)", None),
        ("X.sum(dim=D)", "x.sum(dim=-1)", {"X": "x", "D": "-1"}),
        ("X.sum(dim=D)", "x.sum(-1)", None),
        ("X + X", "a[0] + a[ 0 ]", {"X": "a[0]"}),
        ("X + X", "a[0] + a[1]", None),
        ("len(X)", "len(x)", {"X": "x"}),
        ("X += Y.item()", "total += loss.item()", {"X": "total", "Y": "loss"}),
        ("X == 0", "x == 0.0", None),
        ("X == 1", "x == True", None),
    ],
)
def test_a_form_fits(form: str, line: str, parts: dict[str, str] | None) -> None:
    assert bound(form, line) == parts
