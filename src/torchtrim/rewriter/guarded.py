"""Keeps the original statement for what no run has shown: another rank, type or relation of shapes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as changed
from typing import TypeVar

from torchtrim.records.seen import Seen
from torchtrim.rewriter.fix import Edit, Match
from torchtrim.rewriter.replace import atom, torch_of
from torchtrim.source.facts import Facts, Refused, is_tensor
from torchtrim.source.purity import is_pure, is_simple
from torchtrim.source.source import Function, Source
from torchtrim.source.typed import names_in
from torchtrim.source.uses import stores

T = TypeVar("T")


def kinds_tested(match: Match, facts: Facts, texts: Mapping[str, str], torch: str) -> str:
    """The test that tensors have the ranks and types that were seen: `"(x.dim(), mask.dim()) == (2, 1) and
    mask.dtype == torch.bool"`.

    `texts`: what to write for a part, by its name; those that are no tensors are left out. `torch`: what the
    file calls it. Empty without evidence. Raises `Refused` where runs differ in it.
    """
    ranks: dict[str, int] = {}
    types: list[str] = []
    for part, text in texts.items():
        rank = _common(facts, part, f"the rank of `{text}`", _rank)
        if rank is None or rank < 0:
            continue
        ranks[text] = rank
        if keeps_type(match.source, match.parts[part]):
            kind = _common(facts, part, f"the type of `{text}`", lambda seen: seen.dtype)
            types.append(f"{text}.dtype == {torch}.{kind}")
    test = _equal([f"{text}.dim()" for text in ranks], [str(rank) for rank in ranks.values()])
    return " and ".join([test, *dict.fromkeys(types)]) if test else ""


def _rank(seen: Seen) -> int:
    return len(seen.shape) if is_tensor(seen) else -1


def _common(facts: Facts, part: str, what: str, get: Callable[[Seen], T]) -> T | None:
    """What is the same of a part in all runs that computed it; None where none did."""
    found = {get(getattr(values, part)) for values in facts.executions if values.has(part)}
    if len(found) > 1:
        raise Refused(f"{what} is not the same in all runs that were watched")
    return found.pop() if found else None


def for_kinds_seen(match: Match, facts: Facts, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits for the ranks and types that were seen alone; without evidence as they are.

    The test is of all parts that are tensors, but what is made of them (`R`). Raises `Refused` where the edit
    computes a part.
    """
    source = match.source
    tensors = [
        part
        for part, node in match.parts.items()
        if part != "R"
        and not isinstance(node, ast.Slice | ast.Starred)
        and any(
            values.has(part) and is_tensor(getattr(values, part)) for values in facts.executions
        )
    ]
    texts = {part: of_same_rank(source, match.parts[part]) for part in tensors}
    torch, imports = torch_of(source)
    test = kinds_tested(match, facts, texts, torch)
    if not test:
        return tuple(edits)
    used = {one.id for part in tensors for one in _names(match.parts[part])}
    own = [one for one in edits if one not in imports]
    return (*imports, *_where(match, own, test, used))


def _where(match: Match, edits: Sequence[Edit], test: str, used: set[str]) -> tuple[Edit, ...]:
    """The edits where the test, which uses these names, holds."""
    source = match.source
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


_KEEPS_TYPE = frozenset(("clone", "permute", "transpose", "detach", "contiguous"))
_KEEPS_RANK = _KEEPS_TYPE | frozenset(
    ("to", "float", "half", "bfloat16", "double", "long", "bool", "logical_not")
)


def keeps_type(source: Source, node: ast.expr) -> bool:
    """Whether what `of_same_rank` gives is of the node's type too."""
    while (inner := _inside(source, node)) is not None:
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        turned = isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not)
        if not turned and not (called and node.func.attr in _KEEPS_TYPE):  # type: ignore[attr-defined]
            return False
        node = inner
    return True


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
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
        return node.left
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _KEEPS_RANK
        and source.dotted(node.func) is None
    ):
        return node.func.value
    return None


_HOLDING = ("dict", "list", "defaultdict", "OrderedDict")
NAMED = "NAMED"
"""What parts are called that are the names of others, as `with_names` adds them."""


def with_names(find: Callable[[Source], Iterator[Match]]) -> Callable[[Source], Iterator[Match]]:
    """The same places, with the names that their parts are made of as parts `NAMED0`, `NAMED1`, ..."""

    def named(source: Source) -> Iterator[Match]:
        for match in find(source):
            nodes = {ast.unparse(one): one for one in _made_of(match, match.parts)}
            parts = {f"{NAMED}{n}": node for n, node in enumerate(nodes.values())}
            yield changed(match, parts={**match.parts, **parts})

    return named


def _made_of(match: Match, parts: Iterable[str]) -> Iterator[ast.expr]:
    """The names that parts are made of; of a name that is assigned later, those of what it is assigned."""
    pending, done = [match.parts[part] for part in parts], set()
    while pending:
        for name in _leaves(pending.pop(), match.source):
            later = _assigned_later(match, name)
            if later is None:
                yield name
            elif later not in done:
                done.add(later)
                pending.append(later)


def _leaves(node: ast.AST, source: Source) -> Iterator[ast.expr]:
    """The names, attributes and items by a constant, as `batch["y"]`, that a value is made of."""
    if isinstance(node, ast.Subscript) and _is_item(node) and not list(_dotted(node, source)):
        yield node
    elif isinstance(node, ast.Name | ast.Attribute) and _is_item(node):
        yield from names_in(node, source)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        for one in (node.func.value, *node.args, *node.keywords):
            yield from _leaves(one, source)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _leaves(child, source)


def _dotted(node: ast.AST, source: Source) -> Iterator[ast.AST]:
    return (
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute) and source.dotted(one) is not None
    )


def _is_item(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
        node = node.value
    return isinstance(node, ast.Name)


def _assigned_later(match: Match, name: ast.expr) -> ast.expr | None:
    """What a name is assigned in the match's statement or after it, where it is assigned once."""
    source, function = match.source, match.source.function(match.node)
    if not isinstance(name, ast.Name) or not isinstance(function, Function):
        return None
    places = stores(function, name.id)
    made = source.parents[places[0]] if len(places) == 1 else None
    first = source.start(source.statement(match.begin or match.node))
    if not isinstance(made, ast.Assign) or source.start(made) < first:
        return None
    return made.value


def for_names_seen(
    match: Match, facts: Facts, edits: Sequence[Edit], of: Iterable[str] | None = None
) -> tuple[Edit, ...]:
    """The edits for names of the ranks and types that were seen alone, and else the original.

    `of`: the parts whose types decide what is written, all unless given. They follow from those of their
    names, so none of them may be a function of the script. Without evidence the edits are as they are.
    """
    source = match.source
    test, imports, nodes = names_tested(match, facts, of)
    if not test:
        return tuple(edits)
    check_bound(match, nodes, match.begin or match.node)
    own = [one for one in edits if one not in imports]
    block = source.block(source.statement(match.begin or match.node))
    start, end = source.line_start(block[0].lineno), source.end(block[-1])
    if any(one.start < start or one.end > end for one in own):
        raise Refused("its value is used in another block. Give it a name for each")
    used = {one.id for node in nodes for one in _names(node)}
    return (*imports, *_where(match, own, test, used))


def names_tested(
    match: Match, facts: Facts, of: Iterable[str] | None = None
) -> tuple[str, tuple[Edit, ...], list[ast.expr]]:
    """The test that the names of parts have the ranks and types that were seen, and nothing where none was;
    the import that it needs; the names."""
    source = match.source
    deciding = [part for part in of or match.parts if not part.startswith(NAMED)]
    if any(not is_pure(match.parts[part], source) for part in deciding):
        raise Refused(
            "the type of what a function gives decides what is written. Give it a name first"
        )
    texts = {ast.unparse(one) for one in _made_of(match, deciding)}
    kinds: dict[str, tuple[int, str]] = {}
    nodes: list[ast.expr] = []
    for part, node in match.parts.items():
        if part.startswith(NAMED) and ast.unparse(node) in texts:
            kind = _kind_of(facts, part, ast.unparse(node))
            if kind is not None:
                kinds[source.segment(node)] = kind
                nodes.append(node)
    if not kinds:
        return "", (), []
    torch, imports = torch_of(source)
    test = _equal(
        [f"{text}.{what}" for text in kinds for what in ("dim()", "dtype")],
        [one for rank, kind in kinds.values() for one in (str(rank), f"{torch}.{kind}")],
    )
    return test, imports, nodes


def _kind_of(facts: Facts, part: str, text: str) -> tuple[int, str] | None:
    """The rank and the type of a name in all runs; None for what is no tensor, or was not seen."""
    rank = _common(facts, part, f"the rank of `{text}`", _rank)
    if rank is None:
        facts.leave_open(f"the type of `{text}`")
    if any(
        values.has(part) and getattr(values, part).kind in _HOLDING for values in facts.executions
    ):
        raise Refused(
            f"the type of what `{text}` holds decides what is written. Give it a name first"
        )
    if rank is None or rank < 0:
        return None
    return rank, _common(facts, part, f"the type of `{text}`", lambda seen: seen.dtype) or ""


def check_bound(match: Match, nodes: Iterable[ast.expr], at: ast.AST) -> None:
    """Raises `Refused` where a name is given its value after the statement of `at` only."""
    source = match.source
    end = source.start(source.statement(at))
    for node in nodes:
        for one in ast.walk(source.function(match.node)):
            later = isinstance(one, ast.Name | ast.Attribute) and not isinstance(one.ctx, ast.Load)
            if later and ast.unparse(one) == ast.unparse(node) and source.start(one) > end:
                raise Refused(
                    f"the type of `{ast.unparse(node)}`, which has its value later, decides what is written. "
                    "Move the line behind it"
                )


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
    kept: Sequence[Edit] = (),
) -> tuple[Edit, ...]:
    """The edits made only where the test holds, and else the statements as they are.

    `span`: the first and the last statement that they change. `returns`: both ways end in a return. `kept`:
    the code before the edit where the test does not hold.
    """
    first, last = span
    blanks = source.indentation(first)
    if blanks is None:
        raise Refused("the statement shares its line with another. Give each its own line")
    start, end = source.line_start(first.lineno), source.end(last)
    _check_lines(source, first, last)
    inside = [one for one in edits if start <= one.start and one.end <= end]
    old = _patched(source.text, kept, start, end)
    new = _patched(source.text, inside, start, end)
    newline = source.newline
    lines = [f"{blanks}if {test}:", _deeper(new)]
    lines += [old] if returns else [f"{blanks}else:", _deeper(old)]
    outside = [one for one in edits if one not in inside]
    return (*outside, Edit(start, end, newline.join(lines)))


def _check_lines(source: Source, first: ast.stmt, last: ast.stmt) -> None:
    """Raises `Refused` for a text of several lines, which would not be the same deeper."""
    for node in source.at({(ast.Constant, ""), (ast.JoinedStr, "")}):
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
