"""Guards: fixes apply to the observed ranks, types and shapes, and the original code runs for all others."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.fix import Find, Match, TextEdit, applied, check_comments, with_parts
from torchtrim.rewriter.replace import atom, need_indentation, torch_of
from torchtrim.source.facts import Facts, FixRefused, is_tensor
from torchtrim.source.names import stores
from torchtrim.source.nodes import (
    constant_of,
    find_all,
    is_stored,
    method_of,
    name_set,
    names_bound,
    names_in,
    receiver,
)
from torchtrim.source.operations import is_pure, is_simple
from torchtrim.source.source import Function, SourceFile, spot
from torchtrim.source.typed import operands_in

T = TypeVar("T")


def kinds_tested(match: Match, facts: Facts, texts: Mapping[str, str], torch: str) -> str:
    """Return the test for the observed ranks and types, such as `x.dim() == 2 and x.dtype == torch.bool`.

    `texts` maps parts to the text to write for them; parts that are not tensors are left out. `torch` is the
    file's name for it. Empty without evidence. Raises `FixRefused` if runs differ.
    """
    ranks: dict[str, str] = {}
    types: list[str] = []
    if facts.plain:
        return ""
    for part, text in texts.items():
        rank = _common(facts, part, f"the rank of `{text}`", _rank)
        if rank is None or rank < 0:
            continue
        ranks[f"{text}.dim()"] = str(rank)
        if keeps_type(match.source, match.parts[part]):
            kind = _common(facts, part, f"the type of `{text}`", lambda seen: seen.dtype)
            types.append(f"{text}.dtype == {torch}.{kind}")
    return " and ".join([_equal(ranks), *dict.fromkeys(types)]) if ranks else ""


def _rank(seen: ObservedValue) -> int:
    return len(seen.shape) if is_tensor(seen) else -1


def _common(facts: Facts, part: str, what: str, get: Callable[[ObservedValue], T]) -> T | None:
    shown = {get(getattr(values, part)) for values in facts.executions if values.has(part)}
    if len(shown) > 1:
        raise FixRefused(f"{what} differs between observed runs")
    return shown.pop() if shown else None


def for_kinds_seen(match: Match, facts: Facts, edits: Sequence[TextEdit]) -> tuple[TextEdit, ...]:
    """Guard the edits by the observed ranks and types. Without evidence they are unchanged.

    The test covers all parts that are tensors, except the result (`R`). Raises `FixRefused` if the edit
    computes a part.
    """
    source = match.source
    check_comments(source, edits)
    if facts.plain:
        return tuple(edits)
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
    if not (test := kinds_tested(match, facts, texts, torch)):
        return tuple(edits)
    used = set().union(*(names_in(match.parts[part]) for part in tensors))
    return (*imports, *_where(match, [edit for edit in edits if edit not in imports], test, used))


def _where(
    match: Match, edits: Sequence[TextEdit], test: str, used: set[str]
) -> tuple[TextEdit, ...]:
    """Return the edits under the test, which uses some names, in the expression or around its statements."""
    source = match.source
    if (chosen := _in_place(match, edits, test)) is not None:
        return chosen
    (first, last), inner = _span(source, match, edits)
    if first is last:
        bound = set().union(*(names_in(loop.target) for loop in find_all(first, ast.comprehension)))
    else:
        block = source.block(first)
        bound = set().union(*map(names_bound, block[block.index(first) : block.index(last) + 1]))
    if hidden := used & bound:
        raise FixRefused(
            f"the fix depends on the rank of `{min(hidden)}`, which gets its value there. Write "
            "a loop, or assign it in an earlier statement"
        )
    outer = [edit for edit in edits if edit not in inner]
    returns = isinstance(last, ast.Return)
    return (*outer, *guarded(source, inner, (first, last), test, returns=returns))


_WIDTH = 100
"""Arbitrary: longer lines are split; common formatters allow 79 to 120 characters."""


def _in_place(match: Match, edits: Sequence[TextEdit], test: str) -> tuple[TextEdit, ...] | None:
    """Return the match's expression as `new if test else old`; None if the edits change more than that."""
    source, node = match.source, match.node
    if not isinstance(node, ast.expr) or any(map(_is_long, ast.walk(node))):
        return None
    start, end = source.start(node), source.end(node)
    inner = _edits_in(edits, start, end)
    outer = [edit for edit in edits if edit not in inner]
    if not inner or _edits_in(outer, *_block_of(source, node)):
        return None
    new, old = applied(source.text, inner, start, end), source.text[start:end]
    return (*outer, TextEdit(start, end, _choice(source, node, new, test, old)))


def _edits_in(edits: Iterable[TextEdit], start: int, end: int) -> list[TextEdit]:
    return [edit for edit in edits if start <= edit.start and edit.end <= end]


def _block_of(source: SourceFile, node: ast.AST) -> tuple[int, int]:
    block = source.block(source.statement(node))
    return source.line_start(block[0].lineno), source.end(block[-1])


def _choice(source: SourceFile, node: ast.expr, new: str, test: str, old: str) -> str:
    whole = isinstance(source.parents[node], ast.Return | ast.Assign)
    text = f"{new} if {test} else {old}"
    before = source.start(node) - source.line_start(node.lineno)
    if "\n" not in text and before + len(text) + 2 <= _WIDTH:
        return text if whole else f"({text})"
    line = source.text[source.line_start(node.lineno) :].partition("\n")[0]
    blanks = line[: len(line) - len(line.lstrip())]
    new, old = _deeper(new, first=False), _deeper(old, first=False)
    lines = ["(", f"{blanks}    {new}", f"{blanks}    if {test}", f"{blanks}    else {old}"]
    return source.newline.join([*lines, f"{blanks})"])


def _span(
    source: SourceFile, match: Match, edits: Sequence[TextEdit]
) -> tuple[tuple[ast.stmt, ast.stmt], list[TextEdit]]:
    """Return the first and last statement of the match's block that the edits change, and those edits."""
    begin = match.begin if isinstance(match.begin, ast.stmt) else match.node
    inner = _edits_in(edits, *_block_of(source, begin))
    low, high = min(edit.start for edit in inner), max(edit.end for edit in inner)
    touched = [
        statement
        for statement in source.block(source.statement(begin))
        if source.end(statement) > low and source.line_start(statement.lineno) < max(high, low + 1)
    ]
    if any(hasattr(one, "body") and one is not match.begin for one in touched):
        raise FixRefused("it is in the header of a compound statement. Assign it to a name first")
    return (touched[0], touched[-1]), inner


_KEEPS_TYPE = name_set("clone permute transpose detach contiguous")
_KEEPS_RANK = _KEEPS_TYPE | name_set("to float half bfloat16 double long bool logical_not")


def keeps_type(source: SourceFile, node: ast.expr) -> bool:
    """Return True if the tensor from `of_same_rank` also has the node's type."""
    while (inner := _inside(source, node)) is not None:
        turned = isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not)
        if not turned and method_of(node) not in _KEEPS_TYPE:
            return False
        node = inner
    return True


def of_same_rank(source: SourceFile, node: ast.expr) -> str:
    """Return the text of a tensor of the node's rank: the node without operations that only copy it.

    Raises `FixRefused` if more than a name remains.
    """
    while (inner := _inside(source, node)) is not None:
        node = inner
    if not is_simple(node) and not is_pure(node, source):
        raise FixRefused(
            f"the fix depends on the rank of `{source.segment(node)[:60]}`. Assign it to a name first"
        )
    return atom(source, node)


def _inside(source: SourceFile, node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, ast.Compare) and all(isinstance(c, ast.Constant) for c in node.comparators):
        return node.left
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
        return node.left
    imported = isinstance(node, ast.Call) and source.dotted(node.func)
    return None if imported else receiver(node, _KEEPS_RANK)


NAMED = "NAMED"
"""The prefix of the parts that `with_names` adds."""


def with_names(find: Find) -> Find:
    """Add the names that the parts of each match are computed from, as parts `NAMED0`, `NAMED1`, ..."""

    def names(match: Match) -> Iterable[ast.expr]:
        return {ast.unparse(one): one for one in _made_of(match, match.parts)}.values()

    return with_parts(find, NAMED, names)


def _made_of(match: Match, parts: Iterable[str]) -> Iterator[ast.expr]:
    """Yield the names that parts are computed from; a name assigned later counts as its value's names."""
    pending, done = [match.parts[part] for part in parts], set()
    while pending:
        for name in operands_in(pending.pop(), match.source, items=True):
            if (later := _assigned_later(match, name)) is None:
                yield name
            elif later not in done:
                done.add(later)
                pending.append(later)


def _assigned_later(match: Match, name: ast.expr) -> ast.expr | None:
    source, function = match.source, match.source.function(match.node)
    if not isinstance(name, ast.Name) or not isinstance(function, Function):
        return None
    places = stores(function, name.id)
    assign = source.parents[places[0]] if len(places) == 1 else None
    first = source.start(source.statement(match.begin or match.node))
    if not isinstance(assign, ast.Assign) or source.start(assign) < first:
        return None
    return assign.value


def for_names_seen(
    match: Match, facts: Facts, edits: Sequence[TextEdit], of: Iterable[str] | None = None
) -> tuple[TextEdit, ...]:
    """Guard the edits by the observed ranks and types of names; otherwise the original code runs.

    `of` are the parts whose types decide what is written, by default all. Their types follow from those of
    their names, so a part must not call a function of the script. Without evidence the edits are unchanged.
    """
    source = match.source
    test, imports, nodes = names_tested(match, facts, of)
    if not test:
        return tuple(edits)
    check_bound(match, nodes, match.begin or match.node)
    own = [edit for edit in edits if edit not in imports]
    if len(_edits_in(own, *_block_of(source, match.begin or match.node))) < len(own):
        raise FixRefused("its value is used in another block. Use one name per block")
    return (*imports, *_where(match, own, test, set().union(*map(names_in, nodes))))


def names_tested(
    match: Match, facts: Facts, of: Iterable[str] | None = None
) -> tuple[str, tuple[TextEdit, ...], list[ast.expr]]:
    """Return the test for the observed ranks and types of the parts' names, its import, and the names.

    The test is empty without an observation.
    """
    source = match.source
    if facts.plain:
        return "", (), []
    deciding = [part for part in of or match.parts if not part.startswith(NAMED)]
    if any(not is_pure(match.parts[part], source) for part in deciding):
        raise FixRefused(
            "the fix depends on the type of a function's result. Assign it to a name first"
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
    torch, imports = torch_of(source)  # refuses if the import has no line of its own to follow
    tests: dict[str, str] = {}
    for text, (rank, dtype) in kinds.items():
        tests |= {f"{text}.dim()": str(rank), f"{text}.dtype": f"{torch}.{dtype}"}
    return _equal(tests), imports, nodes


def _kind_of(facts: Facts, part: str, text: str) -> tuple[int, str] | None:
    if (rank := _common(facts, part, f"the rank of `{text}`", _rank)) is None:
        facts.leave_open(f"`{text}` always has the same type")
    shown = (getattr(values, part) for values in facts.executions if values.has(part))
    if any(seen.kind in ("dict", "list", "defaultdict", "OrderedDict") for seen in shown):
        raise FixRefused(
            f"the fix depends on the type of the values in `{text}`. Assign them to names first"
        )
    if rank is None or rank < 0:
        return None
    return rank, _common(facts, part, f"the type of `{text}`", lambda seen: seen.dtype) or ""


def check_bound(match: Match, nodes: Iterable[ast.expr], at: ast.AST) -> None:
    """Raise `FixRefused` if a name gets its value only after the statement of `at`."""
    source = match.source
    end = source.start(source.statement(at))
    parts = ast.walk(source.function(match.node))
    later = {ast.unparse(one) for one in parts if is_stored(one) and source.start(one) > end}
    if late := [text for node in nodes if (text := ast.unparse(node)) in later]:
        raise FixRefused(
            f"the fix depends on the type of `{late[0]}`, which gets its value later. "
            "Move the line after that"
        )


def kinds_seen(known: Iterable[Mapping[str, ObservedValue]], torch: str) -> str:
    """Return the test that tensors, by their text, have the observed ranks and types, and equal shapes.

    Without equal shapes in the run, the test requires the observed ones. Raises `FixRefused` if runs differ.
    """
    tests = list(dict.fromkeys(_kinds(names, torch) for names in known))
    if len(tests) > 1:
        raise FixRefused("ranks, types or relations of shapes differ between runs")
    return tests[0] if tests else ""


def _kinds(names: Mapping[str, ObservedValue], torch: str) -> str:
    tensors = {text: seen for text, seen in sorted(names.items()) if is_tensor(seen)}
    kinds: dict[str, str] = {}
    for text, seen in tensors.items():
        kinds |= {f"{text}.dim()": str(len(seen.shape)), f"{text}.dtype": f"{torch}.{seen.dtype}"}
    sized = [(text, seen.shape) for text, seen in tensors.items() if seen.shape]
    tests = [_equal(kinds)] if tensors else []
    if len(sized) > 1 and len({shape for _, shape in sized}) == 1:
        tests.append(" == ".join(f"{text}.shape" for text, _ in sized))
    elif len(sized) > 1:
        tests += [f"{text}.shape == {tuple(shape)}" for text, shape in sized]
    return " and ".join(tests)


def _equal(values: Mapping[str, str]) -> str:
    if len(values) == 1:
        return " == ".join(*values.items())
    return f"({', '.join(values)}) == ({', '.join(values.values())})"


def guarded(
    source: SourceFile,
    edits: Sequence[TextEdit],
    span: tuple[ast.stmt, ast.stmt],
    test: str,
    *,
    returns: bool = False,
    kept: Sequence[TextEdit] = (),
) -> tuple[TextEdit, ...]:
    """Apply the edits under a test; otherwise the original statements run.

    `span` is the first and last statement that the edits change. `returns`: both branches end in a return.
    `kept` are edits of the code for the other branch.
    """
    first, last = span
    blanks = need_indentation(source, first)
    start, end = source.line_start(first.lineno), source.end(last)
    strings = source.at({(ast.Constant, ""), (ast.JoinedStr, "")})
    if any(_is_long(one) and source.start(first) <= source.start(one) < end for one in strings):
        raise FixRefused("the statement contains a multi-line string. Assign it to a name first")
    inside = _edits_in(edits, start, end)
    old = applied(source.text, kept, start, end)
    lines = [f"{blanks}if {test}:", _deeper(applied(source.text, inside, start, end))]
    lines += [old] if returns else [f"{blanks}else:", _deeper(old)]
    outside = [edit for edit in edits if edit not in inside]
    return (*outside, TextEdit(start, end, source.newline.join(lines)))


def _is_long(node: ast.AST) -> bool:
    """Return True for a string of several lines, which must not be indented."""
    text = isinstance(node, ast.JoinedStr) or isinstance(constant_of(node), str | bytes)
    return text and spot(node)[0] != spot(node)[2]


def _deeper(text: str, *, first: bool = True) -> str:
    deeper = [f"    {line}" if line.strip() else line for line in text.split("\n")]
    return "\n".join(deeper if first else [text.partition("\n")[0], *deeper[1:]])
