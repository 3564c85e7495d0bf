"""Selections by a mask, and elementwise expressions of them."""

from __future__ import annotations

import ast

import pytest

from torchtrim.source.selections import Tree, read_tree, selection
from torchtrim.source.source import SourceFile

HEAD = "import torch\nimport torch.nn.functional as F\n"


def expression(text: str) -> tuple[ast.expr, SourceFile]:
    source = SourceFile("case.py", f"{HEAD}{text}\n")
    (*_, statement) = source.tree.body
    assert isinstance(statement, ast.Expr)
    return statement.value, source


def tree_of(text: str) -> tuple[Tree, SourceFile]:
    node, source = expression(text)
    tree = read_tree(node, source)
    assert tree is not None
    return tree, source


@pytest.mark.parametrize(
    ("text", "tensor", "mask"),
    [
        ("self.x[m]", "self.x", "m"),
        ("x[~m, :, ...]", "x", "~m"),
        ("x[y >= 0]", "x", "y >= 0"),
        ("torch.masked_select(x.t(), m)", "x.t()", "m"),
        ("x[m.nonzero(as_tuple=True)]", "x", "m"),
    ],
)
def test_selections_are_read(text: str, tensor: str, mask: str) -> None:
    node, source = expression(text)
    found = selection(node, source)
    assert found is not None
    assert (source.segment(found.tensor), source.segment(found.mask)) == (tensor, mask)


@pytest.mark.parametrize("text", ["x[0]", "x[1:]", "x[-1]", "x[m, 0]", "x[:, m]", "x[[0, 1]]", "x"])
def test_other_indices_are_none(text: str) -> None:
    assert selection(*expression(text)) is None


def test_the_mask_is_told_from_other_indices() -> None:
    tree, source = tree_of("weights[level] * (x[valid_mask] - y[valid_mask]).abs() / scale")
    assert source.segment(tree.mask) == "valid_mask"
    assert [source.segment(leaf.tensor) for leaf, _ in tree.leaves] == ["x", "y"]
    assert [source.segment(part.node) for part in tree.operands] == ["weights[level]", "scale"]


def test_reduced_dimensions_are_counted() -> None:
    tree, _ = tree_of("x[m].softmax(-1).sum(dim=-1) + y[m]")
    assert [lost for _, lost in tree.leaves] == [1, 0]
    assert sorted(tree.rows) == [1, 1]


@pytest.mark.parametrize(
    "text",
    [
        "x[m].sum(0)",
        "x[m].cumsum(-1)",
        "x[m].view(-1)",
        "net(x[m])",
        "x[m] // y[m]",
        "x[m].add(y[m], alpha=s)",
        "x[m].clamp(*bounds[m])",
        "F.mse_loss(x[m], y[m])",
        "x[m].to(y[m])",
    ],
)
def test_what_is_not_element_by_element_is_no_tree(text: str) -> None:
    assert read_tree(*expression(text)) is None
