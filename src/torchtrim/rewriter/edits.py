"""Applies rewrites to a text, and creates diffs."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchtrim.rewriter.fix import Rewrite, TextEdit
from torchtrim.rewriter.layout import laid_out, width_of
from torchtrim.source.facts import FixRefused
from torchtrim.source.source import SourceFile

_CONTEXT = 3
"""Lines around a change: the default of `diff -u` and git."""
_HUNK = re.compile(r"@@ -(\d+)(\S*) \+(\d+)(\S*) @@\n")


class Patched(NamedTuple):
    """A new text, and for each rewrite the line ranges it has in that text."""

    text: str
    regions: tuple[tuple[tuple[int, int], ...], ...]


def compatible(rewrites: Iterable[Rewrite]) -> list[Rewrite]:
    """Return rewrites that do not overlap. Of overlapping ones the first wins; the others have to wait."""
    chosen: list[Rewrite] = []
    for rewrite in rewrites:
        before = [one for one in chosen if one.match.source is rewrite.match.source]
        edits = [edit for one in before for edit in one.edits]
        if not any(_overlap(edit, other) for edit in rewrite.edits for other in edits):
            chosen.append(rewrite)
    return chosen


def patch(source: SourceFile, rewrites: Sequence[Rewrite]) -> Patched:
    """Return the text with the rewrites applied. Raises `FixRefused` if it is not valid Python."""
    own = dict.fromkeys(edit for rewrite in rewrites for edit in rewrite.edits)
    edits = sorted(own, key=lambda edit: edit[:2])
    new, moved, at = "", [], 0
    for edit in edits:
        new += source.text[at : edit.start]
        moved.append((edit, len(new), len(new) + len(edit.text)))
        new += edit.text
        at = edit.end
    new += source.text[at:]
    try:
        _parse(source, new, edits)
    except (SyntaxError, ValueError) as error:
        raise FixRefused(f"the code it would write is not valid Python: {error}") from None
    spans = {edit: _lines_of(new, start, end) for edit, start, end in moved}
    changed = (line for first, last in spans.values() for line in range(first, last + 1))
    text, at_line = laid_out(new, changed, width_of(source.text), source.newline)
    regions = (
        tuple(
            (at_line[first - 1] + 1, at_line[last])
            for first, last in (spans[edit] for edit, *_ in moved if edit in rewrite.edits)
        )
        for rewrite in rewrites
    )
    return Patched(text, tuple(regions))


def _parse(source: SourceFile, new: str, edits: Sequence[TextEdit]) -> None:
    if not edits:
        return
    first, last = edits[0].start, max(edit.end for edit in edits)
    held, begin = _held(source, source.tree.body, first, last)
    head = ""
    if len(held) == 1 and isinstance(holder := held[0], ast.ClassDef):
        line = holder.body[0].lineno
        if line > holder.lineno and source.line_start(line) <= first:
            held, begin = _held(source, holder.body, first, last)
            head = "class _:\n"
    lines = max([source.line_of(last), *(one.end_lineno or one.lineno for one in held)])
    text = new[begin : source.line_start(lines + 1) + len(new) - len(source.text)]
    if len(ast.parse(head + text).body) > 1 and head:
        raise SyntaxError("the next statement is no longer in its class")


def _held(
    source: SourceFile, body: Sequence[ast.stmt], first: int, last: int
) -> tuple[list[ast.stmt], int]:
    """Return the statements of a block between two offsets, and the offset of their first line."""
    held: list[ast.stmt] = []
    begin = 0
    for one in body:
        top = min([one, *getattr(one, "decorator_list", [])], key=lambda node: node.lineno)
        start = source.line_start(top.lineno)
        if start > last:
            break
        if start <= first:
            begin, held = start, []
        held.append(one)
    return held, begin


def diff_of(path: str, before: str, after: str) -> str:
    """Return a unified diff that `git apply` accepts."""
    old, new = _lines(before), _lines(after)
    head = _alike(old, new)
    tail = _alike(old[head:][::-1], new[head:][::-1])
    first, last = max(0, head - _CONTEXT), max(0, tail - _CONTEXT)
    lines = difflib.unified_diff(
        old[first : len(old) - last],
        new[first : len(new) - last],
        f"a/{path}",
        f"b/{path}",
        n=_CONTEXT,
    )
    return "".join(
        _below(line, first) if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


def _alike(old: Sequence[str], new: Sequence[str]) -> int:
    pairs = zip(old, new, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new)))


def _below(line: str, first: int) -> str:
    found = _HUNK.match(line)
    if found is None or not first:
        return line
    return f"@@ -{int(found[1]) + first}{found[2]} +{int(found[3]) + first}{found[4]} @@\n"


def line_before(before: str, after: str, line: int) -> int:
    """Map a line of the new text to the line of the old text that it was, or that it replaced."""
    if before == after:
        return line
    matcher = difflib.SequenceMatcher(None, _lines(before), _lines(after), autojunk=False)
    for _, start, end, new_start, new_end in matcher.get_opcodes():
        if new_start < line <= new_end:
            return start + max(min(line - new_start, end - start), 1)
    return line


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True) if "\f" not in text else text.split("\n")


def _lines_of(new: str, begin: int, end: int) -> tuple[int, int]:
    first = new.count("\n", 0, begin) + 1
    if begin == end:
        return first, first - 1
    return first, first + new.count("\n", begin, max(begin, end - new[begin:end].endswith("\n")))


def _overlap(one: TextEdit, other: TextEdit) -> bool:
    if one == other:
        return one.start != one.end
    return one.start < other.end and other.start < one.end
