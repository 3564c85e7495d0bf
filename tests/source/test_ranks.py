"""Masks that have all dimensions of a tensor, by the source and at run time."""

from __future__ import annotations

import ast
import itertools

import pytest
import torch

from torchtrim.source.ranks import covers
from torchtrim.source.source import SourceFile

SHAPES = ((4,), (4, 3), (1, 3), (4, 1), (4, 3, 2), ())

COVERED = (
    "x[x > 0]",
    "x[(x > 0) & (y > 0)]",
    "x[~x.isnan()]",
    "x.real[x.real > y]",
    "m = x > y\nx[m]",
    "m = torch.isfinite(y)\nz = torch.zeros_like(y)\nz[m]",
    "x = x.float()\nm = (x * 2 >= y)\nm = ~m\nx[m]",
    "a = torch.max(x, y)\nz = torch.ones_like(x)\nm = (a > 0) & (a < 2)\nz[m]",
    "z = x * y\nm = (x > 0) | (y > 0)\nz[m]",
    "z = x.clone()\nz += 1\nz[x.abs() > 1]",
    "a, b = x * 2, y\nm = torch.logical_and(a > 0, y > 0)\na[m]",
)
OPEN = (
    "x[y > 0]",
    "m = y.bool()\nx[m]",
    "z = x * y\nm = x > 0\nz[m]",
    "z = torch.zeros_like(x)\nm = y == 0\nz[m]",
    "m = x.sum(-1) > 0\nx[m]",
    "m = x[..., 0] > 0\nx[m]",
    "m = torch.max(x, 0)[0] > 0\nx[m]",
    "m = x > 0\nx = x[None].expand(4, *x.shape)\nx[m]",
    "if y.dim():\n    z = y[0]\nelse:\n    z = x\nm = y > 0\nz = torch.stack([y, y], -1)\nz[m]",
    "z = x.clamp(max=y)\nm = x > 0\nz[m]",
    "x[(x > 0).long()]",
)
"""Some of them cannot be told apart from code in which the mask has fewer dimensions."""


def selection(code: str) -> tuple[SourceFile, ast.Subscript]:
    body = "".join(f"    {line}\n" for line in code.splitlines())
    source = SourceFile("case.py", f"import torch\ndef function(x, y):\n{body}")
    last = source.tree.body[-1].body[-1].value  # type: ignore[attr-defined]
    assert isinstance(last, ast.Subscript)
    return source, last


def ranks(code: str) -> list[tuple[int, int]]:
    """The ranks of the tensor and of its index, wherever the code runs."""
    source, last = selection(code)
    head = source.text[: source.start(last)]
    tensor, mask = source.segment(last.value), source.segment(last.slice)
    text = f"{head}kept, at = {tensor}, {mask}\n    kept[at]\n    return kept.dim(), at.dim()\n"
    space: dict[str, object] = {}
    exec(text, space)
    found = []
    for one, other in itertools.product(SHAPES, SHAPES):
        torch.manual_seed(0)
        try:
            found.append(space["function"](torch.randn(one), torch.randn(other)))  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError):
            continue
    return found


@pytest.mark.parametrize("code", COVERED)
def test_a_mask_that_covers_has_the_rank_of_its_tensor_wherever_that_runs(code: str) -> None:
    source, last = selection(code)
    assert covers(last.slice, last.value, source)
    assert (seen := ranks(code))
    assert all(rank == own for rank, own in seen)


@pytest.mark.parametrize("code", OPEN)
def test_what_may_have_fewer_dimensions_is_not_said_to_cover(code: str) -> None:
    source, last = selection(code)
    assert not covers(last.slice, last.value, source)


def test_fewer_dimensions_do_occur() -> None:
    lower = [code for code in OPEN[:-1] if any(own < rank for rank, own in ranks(code))]
    assert len(lower) >= 7, lower
