"""Conditions that choose between two values: `if` with two returns or assignments, `a if c else b`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtrim.source.names import assigned_name, assignment_before, stores
from torchtrim.source.nodes import find_all, function_of, method_of, names_in, negated
from torchtrim.source.operations import is_total
from torchtrim.source.source import SourceFile

Assigns = tuple[ast.Assign, ...]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A choice: `then` if the test is true, else `other`, each after its own assignments.

    `target` is the assigned name, if any; without `other` it keeps its value. `whole` is the `if`, a
    statement or an expression, `last` the return after it. `guards` are tests such as `x.dim() == 2`.
    """

    test: ast.expr
    then: ast.expr
    other: ast.expr | None
    then_before: Assigns = ()
    other_before: Assigns = ()
    target: str | None = None
    whole: ast.If | ast.IfExp
    last: ast.Return | None = None
    guards: tuple[ast.expr, ...] = ()

    @property
    def condition(self) -> ast.expr:
        """The test without a leading `not`."""
        return negated(self.test) or self.test

    @property
    def negated(self) -> bool:
        """True if the test starts with `not`."""
        return negated(self.test) is not None

    @property
    def expressions(self) -> tuple[ast.expr, ...]:
        """Every expression that choosing on the device would compute."""
        assigned = (assign.value for assign in (*self.then_before, *self.other_before))
        return (*(one for one in (self.then, self.other) if one is not None), *assigned)


def branches(source: SourceFile) -> Iterator[Branch]:
    """Yield each choice in a source."""
    for node in source.at({(ast.If, ""), (ast.IfExp, "")}):
        if isinstance(node, ast.IfExp) and not is_guard(node.test):
            yield Branch(test=node.test, then=node.body, other=node.orelse, whole=node)
        elif isinstance(node, ast.If) and not is_elif(source, node):
            yield from filter(None, (_returns(source, node) or _assigns(node),))


def is_guard(test: ast.expr) -> bool:
    """Return True if a condition tests for the observed ranks, as the guards written by fixes do."""
    if not isinstance(test, ast.Compare | ast.BoolOp):
        return False
    calls = {
        f".{method_of(call)}" if isinstance(call.func, ast.Attribute) else function_of(call)
        for call in find_all(test, ast.Call)
    }
    return ".dim" in calls and calls <= {".dim", ".is_tensor", "all", "zip"}


def is_fallback(source: SourceFile, node: ast.AST) -> bool:
    """Return True if a guard keeps the node for other ranks and types: no fix should change it again."""
    chain = [node, *source.around(node)]
    known = next((n for n, one in enumerate(chain) if one in source.fallback), len(chain))
    found = source.fallback[chain[known]] if known < len(chain) else False
    for inner in reversed(chain[:known]):
        found = source.fallback[inner] = found or _is_kept(source, inner)
    return found


def _is_kept(source: SourceFile, inner: ast.AST) -> bool:
    """Return True if the node is a guard's other branch, or follows a guard that returns."""
    if isinstance(inner, ast.stmt) and _follows_guard(source, inner):
        return True
    outer = source.parents.get(inner)
    if isinstance(outer, ast.If | ast.IfExp) and is_guard(outer.test):
        return inner in (outer.orelse if isinstance(outer, ast.If) else [outer.orelse])
    if isinstance(outer, ast.BoolOp) and isinstance(outer.op, ast.Or):
        return inner is not outer.values[0] and is_guard(outer.values[0])
    return False


def _follows_guard(source: SourceFile, statement: ast.stmt) -> bool:
    """Return True if a guard before the statement, in its block, returns for the observed values."""
    if statement in source.parents and statement not in source.behind:
        behind = False
        for one in source.block(statement):
            source.behind[one] = behind
            if isinstance(one, ast.If) and is_guard(one.test):
                behind = behind or isinstance(one.body[-1], ast.Return)
    return source.behind.get(statement, False)


def _for_seen(value: ast.expr) -> tuple[ast.expr, tuple[ast.expr, ...]]:
    """Return the value for the observed ranks, and the guard that tests for them, if any."""
    if isinstance(value, ast.IfExp) and is_guard(value.test):
        return value.body, (value.test,)
    return value, ()


def origins(source: SourceFile, branch: Branch) -> Assigns:
    """Return earlier assignments that the branch depends on, with inputs unchanged since, in order."""
    statement = source.statement(branch.whole)
    found: list[ast.Assign] = []
    pending = [*branch.expressions, *([ast.Name(branch.target)] if branch.target else [])]
    while pending:
        for node in find_all(pending.pop(), ast.Name):
            assign = assignment_before(source, node.id, statement)
            if assign is None or assign in found or not is_total(assign.value, source):
                continue
            lines = range(assign.lineno, statement.lineno)
            bound = (
                store.lineno
                for name in names_in(assign.value)
                for store in stores(source.function(statement), name)
            )
            if not any(line in lines for line in bound):
                found.append(assign)
                pending.append(assign.value)
    return tuple(sorted(found, key=lambda assign: assign.lineno))


def _returns(source: SourceFile, node: ast.If) -> Branch | None:
    then = _returned(node.body)
    block = source.block(node)
    other = _returned(node.orelse or block[block.index(node) + 1 :])
    if then is None or other is None:
        return None
    (value, guard), (other_value, other_guard) = map(_for_seen, (then[1], other[1]))
    return Branch(
        test=node.test,
        then=value,
        other=other_value,
        then_before=then[0],
        other_before=other[0],
        whole=node,
        last=None if node.orelse else other[2],
        guards=(*guard, *other_guard),
    )


def _returned(body: list[ast.stmt]) -> tuple[Assigns, ast.expr, ast.Return] | None:
    before: list[ast.Assign] = []
    for one in body:
        if isinstance(one, ast.Return):
            return (tuple(before), one.value, one) if one.value is not None else None
        if not isinstance(one, ast.Assign) or assigned_name(one) is None:
            return None
        before.append(one)
    return None


def _assigns(node: ast.If) -> Branch | None:
    if len(node.body) != 1 or len(node.orelse) > 1:
        return None
    assigns = [one for one in (*node.body, *node.orelse) if isinstance(one, ast.Assign)]
    targets = {assigned_name(one) for one in (*node.body, *node.orelse)}
    target = targets.pop()
    if target is None or targets:
        return None
    (value, guard), *others = (_for_seen(assign.value) for assign in assigns)
    branch = Branch(test=node.test, then=value, other=None, target=target, whole=node, guards=guard)
    for other, other_guard in others:
        branch = replace(branch, other=other, guards=(*guard, *other_guard))
    return branch


def is_elif(source: SourceFile, node: ast.stmt) -> bool:
    """Return True for the `if` of an `elif`."""
    outer = source.parents.get(node)
    inside = isinstance(node, ast.If) and isinstance(outer, ast.If) and outer.orelse == [node]
    return inside and source.text.startswith("elif", source.start(node))
