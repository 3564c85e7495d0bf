"""Conditions that choose between two values: `if` with two returns or assignments, `a if c else b`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from torchtrim.source.names import assigned_name, assignment_before, stores
from torchtrim.source.nodes import find_all, names_in, negated
from torchtrim.source.operations import is_total
from torchtrim.source.source import SourceFile

Assigns = tuple[ast.Assign, ...]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A choice: `then` if the test is true, else `other`, each after its own assignments.

    `target` is the assigned name, if any; without `other` it keeps its value. `whole` is the `if`, a
    statement or an expression, `last` the return after it.
    """

    test: ast.expr
    then: ast.expr
    other: ast.expr | None
    then_before: Assigns = ()
    other_before: Assigns = ()
    target: str | None = None
    whole: ast.If | ast.IfExp
    last: ast.Return | None = None

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
        if isinstance(node, ast.IfExp):
            yield Branch(test=node.test, then=node.body, other=node.orelse, whole=node)
        elif isinstance(node, ast.If) and not is_elif(source, node):
            yield from filter(None, (_returns(source, node) or _assigns(node),))


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
    return Branch(
        test=node.test,
        then=then[1],
        other=other[1],
        then_before=then[0],
        other_before=other[0],
        whole=node,
        last=None if node.orelse else other[2],
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
    then, other = assigns[0].value, assigns[1].value if len(assigns) > 1 else None
    return Branch(test=node.test, then=then, other=other, target=target, whole=node)


def is_elif(source: SourceFile, node: ast.stmt) -> bool:
    """Return True for the `if` of an `elif`."""
    outer = source.parents.get(node)
    inside = isinstance(node, ast.If) and isinstance(outer, ast.If) and outer.orelse == [node]
    return inside and source.text.startswith("elif", source.start(node))
