"""Where a condition chooses between two values: `if` with two returns or assignments, `a if c else b`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchtrim.source.names import assignment_before
from torchtrim.source.source import Source
from torchtrim.source.total import is_total
from torchtrim.source.uses import names_in, stores

Assigns = tuple[ast.Assign, ...]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A choice: `then` where the test is true, `other` where not, each after assignments of its own.

    `target` is the name that is given the value, None where it is returned or is in an expression.
    `whole` is the `if`, None for an expression; `last` the statement that gives the other value where that
    comes after the `if`. `other` is None where the target stays what it was. `guards`: what must hold for
    the values to be these, where they stand in `value if (x.dim(), y.dim()) == (2, 1) else original`.
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
        """The test without a `not` before it."""
        return self.test.operand if self.turned else self.test  # type: ignore[attr-defined]

    @property
    def turned(self) -> bool:
        """Whether the test has a `not` before it."""
        return isinstance(self.test, ast.UnaryOp) and isinstance(self.test.op, ast.Not)

    @property
    def expressions(self) -> tuple[ast.expr, ...]:
        """All that would be computed."""
        assigned = [one.value for one in (*self.then_before, *self.other_before)]
        return (self.then, *([self.other] if self.other is not None else []), *assigned)


def branches(source: Source) -> Iterator[Branch]:
    """Each such place of a source."""
    for node in source.at({(ast.If, ""), (ast.IfExp, "")}):
        if isinstance(node, ast.IfExp) and not is_guard(node.test):
            yield Branch(test=node.test, then=node.body, other=node.orelse, whole=node)
        elif isinstance(node, ast.If) and not _is_elif(source, node):
            found = _returns(source, node) or _assigns(node)
            if found is not None:
                yield found


def is_guard(test: ast.expr) -> bool:
    """Whether a condition tests for the ranks that were seen, as what a fix keeps its original with does."""
    if not isinstance(test, ast.Compare | ast.BoolOp):
        return False
    called = {_called(one.func) for one in ast.walk(test) if isinstance(one, ast.Call)}
    return ".dim" in called and called <= {".dim", ".is_tensor", "all", "zip"}


def _called(function: ast.expr) -> str:
    """The name of a function, a method's behind a point."""
    if isinstance(function, ast.Attribute):
        return f".{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def is_fallback(source: Source, node: ast.AST) -> bool:
    """Whether it is what a guard keeps for other ranks and types, which is not to be fixed again.

    The answer for a node is kept, since the same ones are asked about often.
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
    if isinstance(outer, ast.If | ast.IfExp) and is_guard(outer.test):
        others = outer.orelse if isinstance(outer, ast.If) else [outer.orelse]
        return any(one is inner for one in others)
    if isinstance(outer, ast.BoolOp) and isinstance(outer.op, ast.Or):
        return inner is not outer.values[0] and is_guard(outer.values[0])
    return False


def _follows_guard(source: Source, statement: ast.stmt) -> bool:
    """Whether a guard before it, in its block, returns for what was seen."""
    if statement not in source.parents:
        return False
    if statement not in source.behind:
        behind = False
        for one in source.block(statement):
            source.behind[one] = behind
            guards = isinstance(one, ast.If) and is_guard(one.test)
            behind = behind or (guards and isinstance(one.body[-1], ast.Return))  # type: ignore[attr-defined]
    return source.behind.get(statement, False)


def _for_seen(value: ast.expr) -> tuple[ast.expr, tuple[ast.expr, ...]]:
    """The value for the ranks that were seen, and the test for these where there is one."""
    if isinstance(value, ast.IfExp) and is_guard(value.test):
        return value.body, (value.test,)
    return value, ()


def origins(source: Source, branch: Branch) -> Assigns:
    """The assignments before, of names that the ways use, in order; what they are made of is unchanged."""
    statement = source.statement(branch.whole)
    found: list[ast.Assign] = []
    pending = [*branch.expressions, *([ast.Name(branch.target)] if branch.target else [])]
    while pending:
        for node in ast.walk(pending.pop()):
            assign = (
                assignment_before(source, node.id, statement)
                if isinstance(node, ast.Name)
                else None
            )
            if assign is None or assign in found or not is_total(assign.value, source):
                continue
            if _still_stands(source, assign, statement):
                found.append(assign)
                pending.append(assign.value)
    return tuple(sorted(found, key=lambda one: one.lineno))


def _still_stands(source: Source, assign: ast.Assign, statement: ast.stmt) -> bool:
    """Whether no name that the assignment uses is bound anew before the statement."""
    used = names_in(assign.value)
    return not any(
        assign.lineno <= one.lineno < statement.lineno
        for name in used
        for one in stores(source.function(statement), name)
    )


def _returns(source: Source, node: ast.If) -> Branch | None:
    then = _returned(node.body)
    block = source.block(node)
    after = node.orelse or block[next(n for n, one in enumerate(block) if one is node) + 1 :]
    other = _returned(after)
    if then is None or other is None:
        return None
    (made, guard), (kept, guards) = map(_for_seen, (then[1].value, other[1].value))  # type: ignore[arg-type]
    return Branch(
        test=node.test,
        then=made,
        other=kept,
        then_before=then[0],
        other_before=other[0],
        whole=node,
        last=None if node.orelse else other[1],
        guards=(*guard, *guards),
    )


def _returned(body: list[ast.stmt]) -> tuple[Assigns, ast.Return] | None:
    """Assignments to names, and then a return."""
    for number, one in enumerate(body):
        if isinstance(one, ast.Return):
            before = tuple(body[:number])
            return (before, one) if one.value is not None else None  # type: ignore[return-value]
        if not isinstance(one, ast.Assign) or _name(one) is None:
            return None
    return None


def _assigns(node: ast.If) -> Branch | None:
    if len(node.body) != 1 or len(node.orelse) > 1:
        return None
    then, other = node.body[0], node.orelse[0] if node.orelse else None
    if not isinstance(then, ast.Assign) or (target := _name(then)) is None:
        return None
    made, guard = _for_seen(then.value)
    branch = Branch(test=node.test, then=made, other=None, target=target, whole=node, guards=guard)
    if other is None:
        return branch
    if not isinstance(other, ast.Assign) or _name(other) != target:
        return None
    kept, guards = _for_seen(other.value)
    return replace(branch, other=kept, guards=(*guard, *guards))


def _name(assign: ast.Assign) -> str | None:
    (target, *others) = assign.targets
    return target.id if not others and isinstance(target, ast.Name) else None


def _is_elif(source: Source, node: ast.If) -> bool:
    outer = source.parents.get(node)
    inside = isinstance(outer, ast.If) and outer.orelse == [node]
    return inside and source.text.startswith("elif", source.start(node))
