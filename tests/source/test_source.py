"""A file's text and tree: positions of nodes, and the meaning of names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draws
from torchtrim.errors import UnreadableInput
from torchtrim.source.source import SourceFile, children, read_source

TEXT = """# -*- coding: utf-8 -*-
import torch
import torch.nn.functional as F
from torch import nn as layers

label = "naïve café 漢字"; x = F.relu(layers.functional.gelu(torch.ones(3)))


def shadowed(F):
    return F.relu(1)


def nested():
    for _ in range(3):
        value = torch.ones(2)
    return value
"""


def node_of(source: SourceFile, text: str) -> ast.AST:
    expressions = (node for node in source.nodes if isinstance(node, ast.expr))
    (found,) = (node for node in expressions if source.segment(node) == text)
    return found


def test_segments_are_the_text_also_behind_wide_characters() -> None:
    source = SourceFile("case.py", TEXT)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.expr):
            assert ast.dump(ast.parse(source.segment(node), mode="eval").body) == ast.dump(
                node
            ).replace("Store()", "Load()")


def test_names_mean_what_the_imports_say() -> None:
    source = SourceFile("case.py", TEXT)
    assert source.dotted(node_of(source, "layers.functional.gelu")) == "torch.nn.functional.gelu"
    relu = [node for node in source.each(ast.Attribute) if node.attr == "relu"]
    assert [source.dotted(node) for node in relu] == ["torch.nn.functional.relu", None]


def test_the_loop_around_a_node_is_that_of_its_own_function() -> None:
    source = SourceFile("case.py", TEXT)
    assert isinstance(source.loop(node_of(source, "torch.ones(2)")), ast.For)
    assert source.loop(node_of(source, "torch.ones(3)")) is None


@pytest.mark.parametrize("text", ["x = (", "x = 1\n  y = 2\n", "\x00", "(" * 500])
def test_an_error_names_a_file_that_is_not_python(text: str) -> None:
    with pytest.raises(UnreadableInput, match=r"case\.py"):
        SourceFile("case.py", text)


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x00", b"# coding: unknown\n", b"# coding: utf-8\n\xe9\n"]
)
def test_an_error_names_a_file_that_is_not_text(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "case.py"
    path.write_bytes(data)
    with pytest.raises(UnreadableInput, match=r"case\.py"):
        read_source(path)


@settings(max_examples=draws.count(100), derandomize=True, deadline=None)
@given(
    words=st.lists(st.text("aé漢\t ", max_size=6), min_size=1, max_size=5),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_offsets_hold_for_every_line_end_and_width(words: list[str], newline: str) -> None:
    text = newline.join(f"x = {word!r}; y = [1, 2]" for word in words) + newline
    source = SourceFile("case.py", text)
    assert [source.segment(node) for node in source.each(ast.List)] == ["[1, 2]"] * len(words)
    assert source.newline == newline


def test_nodes_are_those_of_a_walk_but_for_operators_and_each_gives_those_of_a_type() -> None:
    source = SourceFile(
        "case.py", "def f(x, *y):\n    global z\n    return [-x + 1 for a in y if not a]\n"
    )
    operators = (ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context)
    walked = [one for one in ast.walk(source.tree) if not isinstance(one, operators)]
    assert list(source.nodes) == walked
    assert list(source.each(ast.Name)) == [one for one in walked if isinstance(one, ast.Name)]
    sites = [(ast.Name, ""), (ast.arg, ""), (ast.Name, "")]
    both = [one for one in walked if isinstance(one, ast.Name | ast.arg)]
    assert list(source.at(sites)) == both
    assert all(child in children(outer) for child, outer in source.parents.items())
