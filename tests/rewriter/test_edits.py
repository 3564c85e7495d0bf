"""Several rewrites of one text: their line ranges, and which of them exclude each other."""

from __future__ import annotations

import ast
import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draws
from torchtrim.rewriter.edits import compatible, diff_of, line_before, patch
from torchtrim.rewriter.fix import Fix, Match, Rewrite, TextEdit, Writing
from torchtrim.source.facts import FixRefused
from torchtrim.source.source import SourceFile

TEXT = "a = 1\nb = 2\nc = 3\nd = 4\n"


def rewrite(source: SourceFile, *edits: TextEdit) -> Rewrite:
    fix = Fix(
        codes=(), equivalence="BITWISE", find=lambda _: iter(()), write=lambda *_: Writing(())
    )
    match = Match(fix=fix, source=source, node=source.tree.body[0], parts={})
    return Rewrite(match=match, edits=edits, equivalence="BITWISE")


def test_fixes_stand_where_their_regions_say() -> None:
    source = SourceFile("case.py", TEXT)
    one = rewrite(source, TextEdit(6, 11, "b = 22"), TextEdit(0, 0, "import x\n"))
    other = rewrite(source, TextEdit(18, 23, "d = [\n    4,\n]"))
    found = patch(source, [one, other])
    assert found.text == "import x\na = 1\nb = 22\nc = 3\nd = [\n    4,\n]\n"
    assert found.regions == (((1, 1), (3, 3)), ((5, 7),))


def test_of_fixes_that_touch_only_the_first_is_made() -> None:
    source = SourceFile("case.py", TEXT)
    one, other = rewrite(source, TextEdit(4, 9, "x")), rewrite(source, TextEdit(8, 10, "y"))
    apart = rewrite(source, TextEdit(12, 14, "z"))
    assert compatible([one, other, apart]) == [one, apart]


def test_a_line_is_found_in_the_text_before() -> None:
    after = "import x\na = 1\nb = 22\nb = 23\nc = 3\nd = 4\n"
    assert [line_before(TEXT, after, line) for line in (2, 3, 4, 5, 6)] == [1, 2, 2, 3, 4]


def test_a_diff_says_when_a_file_does_not_end_its_last_line() -> None:
    assert diff_of("case.py", "a = 1", "a = 2\n") == (
        "--- a/case.py\n+++ b/case.py\n@@ -1 +1 @@\n-a = 1\n\\ No newline at end of file\n+a = 2\n"
    )


@settings(max_examples=draws.count(200), derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 40), unique=True), st.data())
def test_a_diff_of_what_changed_is_the_diff_of_all(numbers: list[int], data: st.DataObject) -> None:
    before = [f"line {number}\n" for number in numbers]
    first = data.draw(st.integers(0, len(before)))
    last = data.draw(st.integers(first, len(before)))
    added = data.draw(st.lists(st.integers(41, 50), unique=True, max_size=4))
    after = [*before[:first], *(f"line {number}\n" for number in added), *before[last:]]
    whole = difflib.unified_diff(before, after, "a/case.py", "b/case.py")
    assert diff_of("case.py", "".join(before), "".join(after)) == "".join(whole)


CLASS = """class A:
    @property
    def f(self):
        return 1

    def g(self):
        return 2


x = 3
"""


@pytest.mark.parametrize(
    ("before", "after", "is_python"),
    [
        ("return 1", "return 10", True),
        ("@property", "@cached", True),
        ("class A", "class B(A)", True),
        ("return 2", "return (2", False),
        ("        return 1", "    return 1", False),
        ("    def f", "def f", False),
        ("x = 3", "x = (3", False),
    ],
)
def test_what_is_no_python_any_more_is_refused(before: str, after: str, is_python: bool) -> None:
    source = SourceFile("case.py", CLASS)
    at = CLASS.index(before)
    one = rewrite(source, TextEdit(at, at + len(before), after))
    if is_python:
        assert patch(source, [one]).text == CLASS.replace(before, after, 1)
        return
    with pytest.raises(SyntaxError):
        ast.parse(CLASS.replace(before, after, 1))
    with pytest.raises(FixRefused, match="not valid Python"):
        patch(source, [one])


def test_what_leaves_its_class_is_refused() -> None:
    source = SourceFile("case.py", CLASS)
    at = CLASS.index("\n    def g")
    with pytest.raises(FixRefused, match="no longer in its class"):
        patch(source, [rewrite(source, TextEdit(at, at, "y = 1\n"))])


def test_a_class_of_one_line_stays_python() -> None:
    source = SourceFile("case.py", "@d\nclass A: x = 1\n")
    assert patch(source, [rewrite(source, TextEdit(16, 17, "2"))]).text == "@d\nclass A: x = 2\n"
