"""Applies rewrites to a text, and makes diffs."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchtrim.rewriter.fix import Rewrite, TextEdit
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
        if not any(_touch(rewrite, other) for other in chosen):
            chosen.append(rewrite)
    return chosen


def patch(source: SourceFile, rewrites: Sequence[Rewrite]) -> Patched:
    """Return the text with the rewrites applied. Raises `FixRefused` if it is not valid Python."""
    own = dict.fromkeys(edit for rewrite in rewrites for edit in rewrite.edits)
    edits = sorted(own, key=lambda edit: edit[:2])
    text, moved, at = [], [], 0
    length = 0
    for edit in edits:
        kept = source.text[at : edit.start]
        text += [kept, edit.text]
        length += len(kept)
        moved.append((edit, length, length + len(edit.text)))
        length += len(edit.text)
        at = edit.end
    new = "".join([*text, source.text[at:]])
    try:
        _parse(source, new, edits)
    except (SyntaxError, ValueError) as error:
        raise FixRefused(f"the code it would write is not valid Python: {error}") from None
    regions = tuple(_region(new, rewrite, moved) for rewrite in rewrites)
    return Patched(new, regions)


def _parse(source: SourceFile, new: str, edits: Sequence[TextEdit]) -> None:
    """Parse the new text of the edited statements of the module, or of one of its classes.

    Raises `SyntaxError` or `ValueError` if it is not valid Python.
    """
    if not edits:
        return
    first, last = edits[0].start, max(edit.end for edit in edits)
    held, begin = _held(source, source.tree.body, first, last)
    holder = held[0] if len(held) == 1 else None
    inside = isinstance(holder, ast.ClassDef) and _is_below(source, holder, first)
    if inside:
        held, begin = _held(source, holder.body, first, last)  # type: ignore[union-attr]
    lines = max([source.line_of(last), *(one.end_lineno or one.lineno for one in held)])
    text = new[begin : source.line_start(lines + 1) + len(new) - len(source.text)]
    if len(ast.parse(f"class _:\n{text}" if inside else text).body) > 1 and inside:
        raise SyntaxError("the next statement is no longer in its class")


def _is_below(source: SourceFile, holder: ast.ClassDef, first: int) -> bool:
    """Return True if an offset is in the body of a class whose body starts on its own line."""
    line = holder.body[0].lineno
    return line > holder.lineno and source.line_start(line) <= first


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


def _region(
    new: str, rewrite: Rewrite, moved: Sequence[tuple[TextEdit, int, int]]
) -> tuple[tuple[int, int], ...]:
    return tuple(_lines_of(new, begin, end) for edit, begin, end in moved if edit in rewrite.edits)


def _lines_of(new: str, begin: int, end: int) -> tuple[int, int]:
    first = new.count("\n", 0, begin) + 1
    if begin == end:
        return first, first - 1
    return first, first + new.count("\n", begin, max(begin, end - new[begin:end].endswith("\n")))


def _touch(one: Rewrite, other: Rewrite) -> bool:
    if one.match.source is not other.match.source:
        return False
    return any(_overlap(a, b) for a in one.edits for b in other.edits)


def _overlap(one: TextEdit, other: TextEdit) -> bool:
    if one == other:
        return one.start != one.end
    if one.start == one.end or other.start == other.end:
        return one.start < other.end and other.start < one.end
    return one.start < other.end and other.start < one.end
