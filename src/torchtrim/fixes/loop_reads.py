"""Reads of tensors that a loop does not change, replaced by one read before it or of its iterable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import takewhile

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.reads import name_of
from torchtrim.rewriter.replace import above, atom, insert_before
from torchtrim.source.facts import Facts, FixRefused, is_int, is_tensor
from torchtrim.source.names import (
    binds,
    changes_nothing,
    is_fresh_name,
    is_private,
    loads,
    only_reads,
    stores,
)
from torchtrim.source.nodes import (
    find_all,
    function_of,
    method_of,
    name_set,
    names_in,
    receiver,
)
from torchtrim.source.operations import is_fresh, is_pure
from torchtrim.source.source import Loop, SourceFile, within
from torchtrim.source.transfers import Read, has_own_text, read_of, without_detach

_EAGER = name_set("sum list tuple max min any all sorted set")
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


def _iterations(source: SourceFile) -> Iterator[Match]:
    """Yield loops and comprehensions over a tensor whose elements are only read."""
    for node in source.nodes:
        if isinstance(node, _COMPREHENSIONS) and len(node.generators) == 1:
            (generator,) = node.generators
            yield from _match(source, node, generator.target, generator.iter)
        elif isinstance(node, ast.For):
            yield from _match(source, node, node.target, node.iter)


def _match(
    source: SourceFile, node: ast.AST, target: ast.expr, iterated: ast.expr
) -> Iterator[Match]:
    if (element := _element(target, iterated)) is None:
        return
    name, tensor = element
    reads = [read.node for use in loads(node, name) if (read := _read_of(source, use))]
    if reads and len(reads) == len(loads(node, name)):
        first, last = (choose(reads, key=lambda call: call.lineno) for choose in (min, max))
        yield Match(fix=ITERATED_READ, source=source, node=last, begin=first, parts={"X": tensor})


def _element(target: ast.expr, iterated: ast.expr) -> tuple[str, ast.expr] | None:
    """Return the name of an element and the iterated expression, also inside `enumerate`."""
    if isinstance(target, ast.Name):
        known = isinstance(iterated, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
        return (target.id, iterated) if known and not function_of(iterated) else None
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2:
        return None
    (_, second) = target.elts
    if not isinstance(iterated, ast.Call) or not iterated.args or not isinstance(second, ast.Name):
        return None
    return (second.id, iterated.args[0]) if function_of(iterated) == "enumerate" else None


def _read_of(source: SourceFile, use: ast.Name) -> Read | None:
    outer = source.parents[use]
    call = source.parents[outer] if isinstance(outer, ast.Attribute) else outer
    read = read_of(call, source)
    own = read is not None and read.tensor is use and has_own_text(source, call)
    return read if own else None


def _listed(match: Match, facts: Facts) -> Writing:
    source, tensor = match.source, match.parts["X"]
    facts.need(
        f"`{match.text('X')[:60]}` is a tensor of one dimension",
        lambda v: is_tensor(v.X) and len(v.X.shape) == 1,
        static=lambda v: is_tensor(v.X),
    )
    around = source.parents[tensor]
    if isinstance(around, ast.Call):
        around = source.parents[around]
    assert isinstance(around, ast.comprehension | ast.For)
    element = _element(around.target, around.iter)
    assert element is not None
    name = element[0]
    if not isinstance(around, ast.For):
        around = source.parents[around]
    risk = _risk(match, around)
    if isinstance(around, ast.For):
        _check_name(source, around, name)
    edits = [TextEdit.of(source, tensor, f"{atom(source, tensor)}.flatten().tolist()")]
    for read in (_read_of(source, use) for use in loads(around, name)):
        assert read is not None
        edits.append(TextEdit.of(source, read.node, f"{read.cast}({name})" if read.cast else name))
    return Writing(tuple(edits), risk)


def _risk(match: Match, around: ast.AST) -> str:
    source, tensor = match.source, match.parts["X"]
    if isinstance(around, ast.GeneratorExp) and function_of(source.parents[around]) not in _EAGER:
        raise FixRefused("a generator is read on demand, maybe later. Use a list")
    if changes_nothing(source, around):
        return ""
    if isinstance(around, ast.For) and _keeps(source, around, tensor):
        return ""
    return f"a function called in the meantime might write to `{match.text('X')[:60]}`"


def _check_name(source: SourceFile, loop: ast.For, name: str) -> None:
    """Raise `FixRefused` if the element's name, which becomes a number, is used after the loop."""
    function = source.function(loop)
    alone = len(loads(function, name)) == len(loads(loop, name))
    if not alone or not is_private(source, function, name):
        raise FixRefused(f"`{name}` is used as a tensor after the loop")
    if len(stores(loop, name)) > 1:
        raise FixRefused(f"`{name}` gets another value in the loop")


ITERATED_READ: Fix = Fix(
    name="iterated_read",
    doc="""`[int(v) for v in x]` and `for v in x: ... v.item()` iterate over `x.flatten().tolist()`: one read.

    Iterating over a tensor gives views of its elements, and each is read separately. If an element is used
    only for its number, one copy reads all the numbers. Rows of one element count as elements.

    Applies to tensors of one dimension. Suggested, not applied, if a function called in the meantime might
    write to the tensor, since later elements are now read before that.

    The values that are read are assumed to be real numbers, as in the observed run.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_iterations,
    write=_listed,
)


def _find(source: SourceFile) -> Iterator[Match]:
    """Yield reads in a loop of names that the loop does not bind."""
    for node in source.calls("tolist", "item", "int", "float"):
        tensor = _tensor(source, node)
        if tensor is None or not is_pure(tensor, source) or _is_guarded(source, node):
            continue
        if parts := _parts(source, node, tensor):
            yield Match(fix=INVARIANT_READ, source=source, node=node, parts=parts)


def _tensor(source: SourceFile, node: ast.Call) -> ast.expr | None:
    listed = None if node.args else receiver(node, ("tolist",))
    if listed is not None:
        return without_detach(listed)
    read = read_of(node, source)
    if read is None or read_of(source.parents[node], source) is not None:
        return None
    return read.tensor


def _parts(source: SourceFile, node: ast.Call, tensor: ast.expr) -> dict[str, ast.expr] | None:
    loop = source.loop(node)
    if loop is None or (isinstance(loop, ast.For) and within(node, loop.iter)):
        return None
    if not binds(loop, tensor):
        return {"X": tensor}
    if isinstance(tensor, ast.Subscript) and not binds(loop, tensor.value):
        indices = tensor.slice.elts if isinstance(tensor.slice, ast.Tuple) else [tensor.slice]
        if not any(isinstance(index, ast.Slice | ast.Starred) for index in indices):
            return {"X": tensor.value} | {f"I{n}": index for n, index in enumerate(indices)}
    return None


def _is_guarded(source: SourceFile, node: ast.AST) -> bool:
    """Return True if a test already limits the read to the first time."""
    assign, outer = source.statement(node), source.parents[source.statement(node)]
    return (
        isinstance(assign, ast.Assign)
        and isinstance(outer, ast.If)
        and ast.unparse(outer.test) == f"{ast.unparse(assign.targets[0])} is None"
    )


def _read_once(match: Match, facts: Facts) -> Writing:
    node = match.node_as(ast.Call)
    indices = [name for name in match.parts if name.startswith("I")]
    match.need(facts, "X", "is a tensor", is_tensor, static=True)
    for part in indices:
        match.need(facts, part, "is a Python integer", is_int)
    rank = facts.only("the number of dimensions", lambda v: len(v.X.shape), len(indices) or 1)
    left = rank - len(indices)
    listed = method_of(node) == "tolist"
    if not 0 <= left <= listed:
        raise FixRefused(
            "it reads a list of lists, or a tensor of one element and several dimensions"
        )
    loop, risk = _widest(match)
    shaped = not listed and not facts.seen
    copied = listed and left == 1 and not risk
    edits = _edits(match, loop, indices, copied=copied, shaped=shaped, early=bool(risk))
    return Writing(edits, risk)


def _widest(match: Match) -> tuple[Loop, str]:
    """Return the outermost loop that keeps the tensor unchanged; else the innermost, and the risk."""
    source, tensor = match.source, match.parts["X"]
    loops = list(source.loops(match.node))
    if unchanged := list(takewhile(lambda loop: _keeps(source, loop, tensor), loops)):
        return unchanged[-1], ""
    text = match.text("X")[:60]
    return loops[0], f"a function called in the loop might write to `{text}`, or to what is read"


def _edits(
    match: Match, loop: Loop, indices: list[str], *, copied: bool, shaped: bool, early: bool
) -> tuple[TextEdit, ...]:
    """Return the edits for the read and its value: if `copied`, a list of its own.

    `shaped`: rows of one element may have dimensions. `early`: it is read before the loop, even if that may
    not need it.
    """
    source, node, tensor = match.source, match.node_as(ast.Call), match.parts["X"]
    if not has_own_text(source, node):
        raise FixRefused("it is inside an f-string. Assign it to a name first")
    what = "list" if method_of(node) == "tolist" or indices else "value"
    name = name_of(source, node, tensor, what)
    value = name + "".join(f"[{match.text(part)}]" for part in indices)
    outer = source.parents[node]
    sequence = ast.Tuple | ast.List
    unpacked = isinstance(outer, ast.Assign) and all(isinstance(t, sequence) for t in outer.targets)
    if copied and not unpacked:
        value = f"list({value})"
    read = read_of(node, source)
    if read is not None and read.cast:
        value = f"{read.cast}({value})"
    text = " ".join(line.strip() for line in atom(source, tensor).splitlines())
    if shaped:
        many = len(indices)
        text += ".flatten()" if many == 1 else f".reshape({text}.shape[:{many}])"
    tests = _tests(source, node, loop) if early else None
    if _is_tensor_before(source, loop, tensor):
        tests = []
    if tests is not None:
        head = f"if {' and '.join(tests)}:\n    " if tests else ""
        first = above(source, loop, f"{head}{name} = {text}.tolist()")
        return (first, TextEdit.of(source, node, value))
    once = f"if {name} is None:\n    {name} = {text}.tolist()"
    return (
        above(source, loop, f"{name} = None"),
        insert_before(source, node, once),
        TextEdit.of(source, node, value),
    )


def _tests(source: SourceFile, node: ast.AST, loop: Loop) -> list[str] | None:
    """Return the names whose truth decides in a loop whether a node runs; None if anything else does."""
    tests: list[str] = []
    inner = node
    for outer in takewhile(lambda one: one is not loop, source.around(node)):
        if isinstance(outer, ast.If | ast.IfExp):
            plain = isinstance(outer.test, ast.Name) and not binds(loop, outer.test)
            body = outer.body if isinstance(outer.body, list) else [outer.body]
            if not plain or inner not in body:
                return None
            tests.insert(0, source.segment(outer.test))
        elif isinstance(outer, ast.stmt | ast.BoolOp) and not isinstance(outer, _PLAIN):
            return None
        inner = outer
    return tests


_PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.With, ast.For)


def _is_tensor_before(source: SourceFile, loop: Loop, tensor: ast.expr) -> bool:
    """Return True if a name is used as a tensor in a statement before the loop, so that it is not None."""
    if not isinstance(tensor, ast.Name):
        return False
    block = source.block(loop)
    before = block[: block.index(loop)]
    for statement in reversed(before):
        if stores(statement, tensor.id):
            return isinstance(statement, ast.Assign) and is_fresh(statement.value, source)
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Assert):
            continue
        for use in loads(statement, tensor.id):
            outer = source.parents[use]
            if isinstance(outer, ast.BinOp | ast.Attribute) and _always(source, use):
                return True
    return False


def _always(source: SourceFile, use: ast.Name) -> bool:
    """Return True if a statement always computes a part of it."""
    around = iter(source.around(use))
    optional = (
        ast.IfExp,
        ast.BoolOp,
        ast.Lambda,
        ast.comprehension,
        *_COMPREHENSIONS,
        ast.DictComp,
    )
    return not any(
        isinstance(o, optional) for o in takewhile(lambda o: not isinstance(o, ast.stmt), around)
    )


INVARIANT_READ: Fix = Fix(
    name="invariant_read",
    doc="""`mask.sum(1).tolist()` and `sizes[i].tolist()` in a loop are read once, before they are first
    needed.

    A read in a loop waits in each iteration. If its tensor stays the same throughout the loop, one read is
    enough; if the read is of a row of such a tensor, the whole tensor is read once and the row taken on the
    host. The read happens when it is first needed, unless code before the loop shows that the name is a
    tensor, or the fix is only suggested. Lists are copied, since the code that gets one may change it.

    Applies if nothing in the loop can write to the tensor: it has a single alias that is read-only, or the
    loop calls only known functions. Otherwise it is suggested, since a function that is called might write to
    it.

    The values that are read are assumed to be real numbers, as in the observed run.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_find,
    write=_read_once,
)


def _keeps(source: SourceFile, loop: Loop, expression: ast.expr) -> bool:
    """Return True if an expression's names refer to the same, unchanged tensors throughout the loop."""
    if binds(loop, expression):
        return False
    if changes_nothing(source, loop):
        return True
    for node in find_all(expression, ast.Attribute):
        outer = source.parents[node]
        method = isinstance(outer, ast.Call) and outer.func is node
        if not method and source.dotted(node) is None:
            return False
    return all(
        is_fresh_name(source, name, loop)
        and all(only_reads(source, use) for use in loads(loop, name))
        for name in names_in(expression) - source.imported.keys()
    )


FIXES = (INVARIANT_READ, ITERATED_READ)
