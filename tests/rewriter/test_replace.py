"""Replacing a match by a template."""

from __future__ import annotations

import ast

import pytest

from torchtrim.rewriter.edits import patch
from torchtrim.rewriter.fix import Fix, Match, Rewrite, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, FixRefused
from torchtrim.source.source import SourceFile


def written(form: str, template: str, line: str, head: str = "import torch\n") -> str:
    """Return the line after the template replaced the match."""

    def write(match: Match, facts: Facts) -> Writing:
        return Writing(replace(match, template))

    fix = Fix(codes=(), equivalence="BITWISE", find=of_forms(lambda: fix, form), write=write)
    source = SourceFile("case.py", head + line)
    (match,) = fix.find(source)
    rewrite: Rewrite = fix.rewrite(match, Facts())
    text = patch(source, [rewrite]).text
    ast.parse(text)
    return text.removeprefix(head)


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("y = take(a)", "y = a * 2\n"),
        ("y = take(a + b)", "y = (a + b) * 2\n"),
        ("y = take(a) ** 2", "y = (a * 2) ** 2\n"),
        ("y = f(take(a), 1)", "y = f(a * 2, 1)\n"),
        ("y = -take(a)", "y = -(a * 2)\n"),
        ("y = take(a).sum()", "y = (a * 2).sum()\n"),
        ("y = [take(a)\n     ]", "y = [a * 2\n     ]\n"),
        ("y = take(a if b else c)", "y = (a if b else c) * 2\n"),
        ("y = take((a, b))", "y = (a, b) * 2\n"),
        ("y = take(1)", "y = 1 * 2\n"),
        ("y = (take(a)\n     .sum())", "y = ((a * 2)\n     .sum())\n"),
    ],
)
def test_parentheses_stand_where_they_must(line: str, after: str) -> None:
    assert written("take(X)", "X * 2", line + "\n") == after


def test_a_number_with_a_method_is_parenthesized() -> None:
    assert written("take(X)", "X.sum()", "y = take(1)\n") == "y = (1).sum()\n"


def test_a_part_that_stands_twice_gets_a_name() -> None:
    line = "def f(a, b):\n    return g(twice(a + b))\n"
    assert (
        written("twice(X)", "X + X", line) == "def f(a, b):\n    x = a + b\n    return g(x + x)\n"
    )


def test_a_name_may_stand_twice() -> None:
    assert written("twice(X)", "X + X", "y = twice(a.b)\n") == "y = a.b + a.b\n"


@pytest.mark.parametrize(
    "line",
    [
        "y = a and twice(b + c)",
        "y = [twice(b + c) for b in a]",
        "y = 1 if a else twice(b + c)",
        "while twice(b + c): pass",
        "if a: pass\nelif twice(b + c): pass",
        "y = (lambda: twice(b + c))()",
        "f(); y = twice(b + c)",
        "y = unknown() + twice(b + c)",
    ],
)
def test_what_would_run_more_or_less_often_is_refused(line: str) -> None:
    with pytest.raises(FixRefused, match="statement before"):
        written("twice(X)", "X + X", line + "\n")


def test_an_effect_is_not_run_twice() -> None:
    with pytest.raises(FixRefused, match="may have a side effect"):
        written("twice(X)", "X + X", "y = twice(next(a))\n")


def test_an_effect_is_not_dropped() -> None:
    with pytest.raises(FixRefused, match="may have a side effect"):
        written("first(X, Y)", "X", "y = first(a, draw())\n")


def test_effects_keep_their_order() -> None:
    with pytest.raises(FixRefused, match="may have a side effect"):
        written("swap(X, Y)", "Y + X", "y = swap(draw(), pull())\n")
    assert written("join(X, Y)", "X + Y", "y = join(draw(), pull())\n") == "y = draw() + pull()\n"


def test_a_comment_within_is_not_lost() -> None:
    with pytest.raises(FixRefused, match="# why"):
        written("take(X)", "X", "y = take(\n    a  # why\n)\n")


def test_torch_is_called_what_the_file_calls_it_and_imported_where_it_is_not() -> None:
    assert (
        written("take(X)", "torch.sum(X)", "y = take(a)\n", "import torch as t\n")
        == "y = t.sum(a)\n"
    )
    text = written("take(X)", "torch.sum(X)", "y = take(a)\n", '"""Doc."""\n')
    assert text == "import torch\ny = torch.sum(a)\n"
