"""Keeps the original statement for what no run has shown: another rank, type or relation of shapes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from torchtrim.fixes.base import Edit, Match
from torchtrim.fixes.reading.branches import is_guard
from torchtrim.fixes.reading.facts import Facts, Refused, is_tensor
from torchtrim.fixes.reading.purity import is_pure, is_simple
from torchtrim.fixes.reading.source import Source
from torchtrim.fixes.writing.replace import atom
from torchtrim.records.seen import Seen


def ranks_seen(facts: Facts, texts: Mapping[str, str]) -> str:
    """The test that tensors have the ranks that were seen: `"(x.dim(), mask.dim()) == (3, 2)"`.

    `texts`: what to write for a part, by its name; those that are no tensors are left out. Empty without
    evidence. Raises `Refused` where runs differ in it.
    """
    named: dict[str, int] = {}
    for part, text in texts.items():
        seen = facts.only(f"the rank of `{text}`", lambda v, part=part: _rank(getattr(v, part)), -1)  # type: ignore[misc]
        if seen >= 0:
            named[text] = seen
    return _equal([f"{text}.dim()" for text in named], [str(rank) for rank in named.values()])


def _rank(seen: Seen) -> int:
    return len(seen.shape) if is_tensor(seen) else -1


def for_ranks_seen(
    match: Match, facts: Facts, edits: Sequence[Edit], *, torch: str = ""
) -> tuple[Edit, ...]:
    """The edits for the ranks that were seen alone; without evidence as they are.

    The test is of all parts that are tensors, but what is made of them (`R`). `torch`: what the file calls
    it, for types to be tested too. Raises `Refused` where the edit computes a part.
    """
    source = match.source
    tensors = [
        part
        for part, node in match.parts.items()
        if part != "R"
        and not isinstance(node, ast.Slice | ast.Starred)
        and facts.holds(lambda v, part=part: is_tensor(getattr(v, part)))  # type: ignore[misc]
    ]
    texts = {part: of_same_rank(source, match.parts[part]) for part in tensors}
    test = ranks_seen(facts, texts)
    if test and torch:
        test = _with_types(facts, texts, test, torch)
    if not test:
        return tuple(edits)
    if (chosen := _in_place(match, edits, test)) is not None:
        return chosen
    span, inner = _span(source, match, edits)
    made = {
        node.id
        for statement in source.block(span[0])
        if source.start(span[0]) <= source.start(statement) <= source.start(span[1])
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    used = {one.id for part in tensors for one in _names(match.parts[part])}
    bound = {one.id for node in _loops(span) for one in _names(node.target)}
    if hidden := used & (bound if span[0] is span[1] else made):
        raise Refused(
            f"the rank of `{min(hidden)}`, which has its value there, decides what is written. Write a "
            "loop, or a statement before"
        )
    outer = [one for one in edits if one not in inner]
    returns = isinstance(span[1], ast.Return)
    return (*outer, *guarded(source, inner, span, test, returns=returns))


_WIDTH = 100


def _in_place(match: Match, edits: Sequence[Edit], test: str) -> tuple[Edit, ...] | None:
    """The match's expression as `new if test else old`, so that its statement stays one.

    None where more than the expression is edited.
    """
    source, node = match.source, match.node
    if not isinstance(node, ast.expr) or any(_is_long(one) for one in ast.walk(node)):
        return None
    start, end = source.start(node), source.end(node)
    inner = [one for one in edits if start <= one.start and one.end <= end]
    block = source.block(source.statement(node))
    first, last = source.line_start(block[0].lineno), source.end(block[-1])
    outer = [one for one in edits if one not in inner]
    if not inner or any(first <= one.start and one.end <= last for one in outer):
        return None
    new, old = _patched(source.text, inner, start, end), source.text[start:end]
    return (*outer, Edit(start, end, _choice(source, node, new, test, old)))


def _choice(source: Source, node: ast.expr, new: str, test: str, old: str) -> str:
    """A conditional expression, on a line of its own for each part where it is long."""
    outer = source.parents[node]
    whole = isinstance(outer, ast.Return | ast.Assign)
    text = f"{new} if {test} else {old}"
    before = source.start(node) - source.line_start(node.lineno)
    if "\n" not in text and before + len(text) + 2 <= _WIDTH:
        return text if whole else f"({text})"
    line = source.text[source.line_start(node.lineno) :].partition("\n")[0]
    blanks = line[: len(line) - len(line.lstrip())]
    new, old = _deeper(new, first=False), _deeper(old, first=False)
    lines = ["(", f"{blanks}    {new}", f"{blanks}    if {test}", f"{blanks}    else {old}"]
    return source.newline.join([*lines, f"{blanks})"])


def _with_types(facts: Facts, texts: Mapping[str, str], test: str, torch: str) -> str:
    """The test of ranks, and of the types of floating tensors."""
    types: dict[str, str] = {}
    for part, text in texts.items():
        kind = facts.only(f"the type of `{text}`", lambda v, part=part: getattr(v, part).dtype, "")  # type: ignore[misc]
        if kind and kind != "bool":
            types[text] = f"{torch}.{kind}"
    return " and ".join([test, *(f"{text}.dtype == {kind}" for text, kind in types.items())])


def _loops(span: tuple[ast.stmt, ast.stmt]) -> Iterable[ast.comprehension]:
    return (one for end in span for one in ast.walk(end) if isinstance(one, ast.comprehension))


def _names(node: ast.AST) -> Iterable[ast.Name]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Name))


def _span(
    source: Source, match: Match, edits: Sequence[Edit]
) -> tuple[tuple[ast.stmt, ast.stmt], list[Edit]]:
    """The first and the last statement of the match's block that the edits change, and those edits."""
    begin = match.begin if isinstance(match.begin, ast.stmt) else match.node
    block = source.block(source.statement(begin))
    start, end = source.line_start(block[0].lineno), source.end(block[-1])
    inner = [one for one in edits if start <= one.start and one.end <= end]
    low, high = min(one.start for one in inner), max(one.end for one in inner)
    touched = [
        one
        for one in block
        if source.end(one) > low and source.line_start(one.lineno) < max(high, low + 1)
    ]
    if any(hasattr(one, "body") and one is not match.begin for one in touched):
        raise Refused("it is in the head of a statement that has a body. Give it a name first")
    return (touched[0], touched[-1]), inner


_KEEPS_RANK = frozenset(
    (
        "clone",
        "permute",
        "transpose",
        "detach",
        "contiguous",
        "to",
        "float",
        "half",
        "bfloat16",
        "double",
        "long",
        "bool",
        "logical_not",
    )
)


def of_same_rank(source: Source, node: ast.expr) -> str:
    """The text of a tensor of the node's rank: the node without what only copies it.

    Raises `Refused` where that is more than a name.
    """
    while (inner := _inside(source, node)) is not None:
        node = inner
    if not is_simple(node) and not is_pure(node, source):
        raise Refused(
            f"the rank of `{source.segment(node)[:60]}` decides what is written. Give it a name first"
        )
    return atom(source, node)


def _inside(source: Source, node: ast.expr) -> ast.expr | None:
    """What an expression of the same rank is made of."""
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, ast.Compare) and all(isinstance(c, ast.Constant) for c in node.comparators):
        return node.left
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _KEEPS_RANK
        and source.dotted(node.func) is None
    ):
        return node.func.value
    return None


def kinds_seen(known: Iterable[Mapping[str, Seen]], torch: str) -> str:
    """The test that tensors, by their text, have the ranks and types that were seen, and equal shapes as
    those had.

    Raises `Refused` where runs differ in it.
    """
    found = [_kinds(names, torch) for names in known]
    if any(one != found[0] for one in found):
        raise Refused("ranks, types or relations of shapes are not the same in all runs")
    return found[0] if found else ""


def _kinds(names: Mapping[str, Seen], torch: str) -> str:
    tensors = {text: seen for text, seen in sorted(names.items()) if is_tensor(seen)}
    left = [f"{text}.{what}" for text in tensors for what in ("dim()", "dtype")]
    right = [
        one for seen in tensors.values() for one in (str(len(seen.shape)), f"{torch}.{seen.dtype}")
    ]
    sized = [(text, seen.shape) for text, seen in tensors.items() if seen.shape]
    tests = [_equal(left, right)] if tensors else []
    if len(sized) > 1 and len({shape for _, shape in sized}) == 1:
        tests.append(" == ".join(f"{text}.shape" for text, _ in sized))
    elif len(sized) > 1:
        tests += [f"{text}.shape == {tuple(shape)}" for text, shape in sized]
    return " and ".join(tests)


def _equal(left: Sequence[str], right: Sequence[str]) -> str:
    if not left:
        return ""
    if len(left) == 1:
        return f"{left[0]} == {right[0]}"
    return f"({', '.join(left)}) == ({', '.join(right)})"


def guarded(
    source: Source,
    edits: Sequence[Edit],
    span: tuple[ast.stmt, ast.stmt],
    test: str,
    *,
    returns: bool = False,
) -> tuple[Edit, ...]:
    """The edits made only where the test holds, and else the statements as they are.

    `span`: the first and the last statement that they change. `returns`: both ways end in a return.
    """
    first, last = span
    blanks = source.indentation(first)
    if blanks is None:
        raise Refused("the statement shares its line with another. Give each its own line")
    start, end = source.line_start(first.lineno), source.end(last)
    _check_lines(source, first, last)
    inside = [one for one in edits if start <= one.start and one.end <= end]
    old, new = source.text[start:end], _patched(source.text, inside, start, end)
    newline = source.newline
    lines = [f"{blanks}if {test}:", _deeper(new)]
    lines += [old] if returns else [f"{blanks}else:", _deeper(old)]
    outside = [one for one in edits if one not in inside]
    return (*outside, Edit(start, end, newline.join(lines)))


def _check_lines(source: Source, first: ast.stmt, last: ast.stmt) -> None:
    """Raises `Refused` for a text of several lines, which would not be the same deeper."""
    for node in ast.walk(source.tree):
        if _is_long(node) and source.start(first) <= source.start(node) < source.end(last):
            raise Refused("a text of several lines is in the statement. Give it a name first")


def _is_long(node: ast.AST) -> bool:
    """Whether it is a text of several lines."""
    text = isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )
    return text and node.lineno != node.end_lineno  # type: ignore[attr-defined]


def _patched(text: str, edits: Iterable[Edit], start: int, end: int) -> str:
    at, parts = start, []
    for one in sorted(edits):
        parts += [text[at : one.start], one.text]
        at = one.end
    return "".join([*parts, text[at:end]])


def _deeper(text: str, *, first: bool = True) -> str:
    """The text four blanks to the right; its first line too, unless that is behind something."""
    deeper = [f"    {line}" if line.strip() else line for line in text.split("\n")]
    return "\n".join(deeper if first else [text.partition("\n")[0], *deeper[1:]])


def is_fallback(source: Source, node: ast.AST) -> bool:
    """Whether it is what a guard keeps for other ranks and types, which is not to be fixed again.

    What is told of a node is kept, since much is asked about what is around the same ones.
    """
    chain: list[ast.AST] = []
    at: ast.AST | None = node
    while at is not None and at not in source.fallback:
        chain.append(at)
        at = source.parents.get(at)
    found = at is not None and source.fallback[at]
    for inner in reversed(chain):
        found = found or _is_kept(source, inner)
        source.fallback[inner] = found
    return found


def _is_kept(source: Source, inner: ast.AST) -> bool:
    """Whether it is itself the other way of a guard, or behind one that returns."""
    if isinstance(inner, ast.stmt) and _follows_guard(source, inner):
        return True
    outer = source.parents.get(inner)
    if not isinstance(outer, ast.If | ast.IfExp) or not is_guard(outer.test):
        return False
    others = outer.orelse if isinstance(outer, ast.If) else [outer.orelse]
    return any(one is inner for one in others)


def _follows_guard(source: Source, statement: ast.stmt) -> bool:
    """Whether a guard before it, in its block, returns for what was seen."""
    if statement not in source.parents:
        return False
    for one in source.block(statement):
        if one is statement:
            return False
        if isinstance(one, ast.If) and is_guard(one.test) and isinstance(one.body[-1], ast.Return):
            return True
    return False
