"""Wraps statements that a fix made longer than the file's own lines, as common formatters do."""

from __future__ import annotations

import ast
import io
import itertools
import re
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence

_LEAST, _MOST = 100, 120
"""Columns. Arbitrary: below the first no line is worth wrapping, and few projects allow the second."""
_STEP = "    "
_OPEN, _CLOSE = "([{", ")]}"
_LOGIC, _SUM = ("and", "or"), ("+", "-")
_EXPRESSION = re.compile(r"((?:if|while|return) |[^=]*[^=!<>:]= )(.+?)(:?)")
"""A head of a block, a return or an assignment: what is before an expression, it, and what is after it."""
Cut = tuple[int, int]


def width_of(text: str) -> int:
    """Return the length of a file's longest line of code, within what formatters allow."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return max(_LEAST, min(_MOST, max(map(len, lines), default=0)))


def laid_out(text: str, lines: Iterable[int], width: int, newline: str) -> tuple[str, list[int]]:
    """Return a text with some of its lines wrapped, and the number that each line has then, from 0."""
    wanted = set(lines)
    parts: list[str] = []
    moved: list[int] = []
    for number, line in enumerate(text.split(newline), start=1):
        moved.append(len(parts))
        parts += wrapped(line, width) if number in wanted else [line]
    return newline.join(parts), [*moved, len(parts)]


def wrapped(line: str, width: int) -> list[str]:
    """Return a statement of one line as lines within a width, as far as its brackets allow."""
    blanks = line[: len(line) - len(line.lstrip())]
    if len(line) <= width or "#" in line:
        return [line]
    if not (meaning := _meaning(line)):
        return _arguments(line.strip(), blanks) or [line]
    lines = _wrapped(line.strip(), blanks, width)
    return lines if _meaning("\n".join(lines)) == meaning else [line]


def _arguments(text: str, blanks: str) -> list[str]:
    """Return a line of arguments with at least one keyword as a line for each; none for other lines."""
    try:
        call = ast.parse(f"_({text})", mode="eval").body
    except SyntaxError:
        return []
    if not isinstance(call, ast.Call) or not call.keywords or ast.unparse(call.func) != "_":
        return []
    return [f"{blanks}{part.strip()}," for part in _parts(text, [","]) if part.strip()]


def _meaning(text: str) -> str:
    """Return the tree of a statement, or of the head of a compound one, as text; `""` for other lines."""
    whole = textwrap.dedent(text)
    try:
        return ast.dump(ast.parse(f"{whole} pass" if whole.endswith(":") else whole))
    except SyntaxError:
        return ""


def _wrapped(text: str, blanks: str, width: int) -> list[str]:
    if len(blanks) + len(text) <= width:
        return [blanks + text]
    match = _EXPRESSION.fullmatch(text)
    if match and len(terms := _terms(match[2])) > 1:
        lines = [line for term in terms for line in _wrapped(term, blanks + _STEP, width)]
        return [f"{blanks}{match[1]}(", *lines, f"{blanks}){match[3]}"]
    if (pair := _last_pair(text)) is None:
        return [blanks + text]
    start, end = pair
    inside = _inside(text[start + 1 : end].strip(), blanks + _STEP, width)
    return [blanks + text[: start + 1], *inside, blanks + text[end:]]


def _inside(text: str, blanks: str, width: int) -> list[str]:
    """Return the content of brackets: in one line if it fits, else one line for each part."""
    if len(blanks) + len(text) <= width:
        return [blanks + text]
    parts = [part for part in _parts(text, [","]) if part.strip()]
    if len(parts) > 1:
        lines = [_wrapped(f"{part.strip()},", blanks, width) for part in parts]
        return [line for every in lines for line in every]
    return [line for term in _terms(text) for line in _wrapped(term, blanks, width)]


def _terms(text: str) -> list[str]:
    """Return the operands of a condition or else of a sum, all but the first with the operator before it."""
    parts = _parts(text, _LOGIC, before=True)
    parts = parts if len(parts) > 1 else _parts(text, _SUM, before=True)
    return [part.strip() for part in parts]


def _parts(text: str, marks: Sequence[str], *, before: bool = False) -> list[str]:
    """Split a text at marks outside all brackets; the marks stay if they begin the next part."""
    cuts = [
        at
        for at, word, depth, operand in _tokens(text)
        if depth == 0 and word in marks and (operand or not before)
    ]
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    return pieces if before else [piece.removeprefix(",") for piece in pieces]


def _last_pair(text: str) -> Cut | None:
    """Return the last pair of brackets outside all others that holds more than it costs to split."""
    found: list[Cut] = []
    start = 0
    for at, word, depth, _ in _tokens(text):
        if word in _OPEN and depth == 0:
            start = at
        elif word in _CLOSE and depth == 0 and at > start + len(_STEP):
            found.append((start, at))
    return max(found, key=lambda pair: pair[1] - pair[0], default=None)


def _tokens(text: str) -> Iterator[tuple[int, str, int, bool]]:
    """Yield the offset and text of each token, its depth in brackets, and whether an operand precedes it.

    Brackets have the depth of what is around them.
    """
    depth, operand = 0, False
    for token in tokenize.generate_tokens(io.StringIO(f"({text})").readline):
        at, word = token.start[1] - 1, token.string
        if not word or token.start[0] > 1 or not 0 <= at < len(text):
            continue
        depth -= word in _CLOSE
        yield at, word, depth, operand
        depth += word in _OPEN
        operand = token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING) or word in _CLOSE
