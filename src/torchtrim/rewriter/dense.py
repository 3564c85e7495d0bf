"""Writes a computation on selected elements as one on all elements, with harmless values for the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from torchtrim.rewriter.fix import Match, TextEdit, applied
from torchtrim.rewriter.replace import atom, fresh, insert_before, runs_first
from torchtrim.source.facts import Facts, FixRefused
from torchtrim.source.forms import equal
from torchtrim.source.names import assigned_name, loads, stores
from torchtrim.source.nodes import names_bound, names_in
from torchtrim.source.operations import is_pure, is_simple
from torchtrim.source.selections import Tree, selection, tensor_part, trailing
from torchtrim.source.source import Function, Loop, SourceFile, within


class Dense:
    """Writes a tree's expressions over all elements.

    `at` is where the mask may get a name, in a statement before, unless it is a name already. `torch` is the
    file's name for torch. `flows`: gradients flow, or may flow, through the result; set it to False where
    they cannot. If they do, all tensors get a harmless value at unselected elements. The copies also protect
    what backward needs from later in-place changes, as the selection did.
    """

    def __init__(self, match: Match, facts: Facts, tree: Tree, *, at: ast.AST, torch: str) -> None:
        self._match, self._facts, self._tree = match, facts, tree
        self._source = match.source
        self._torch = torch
        self.behind = facts.only("its number of dimensions", lambda v: trailing(v, tree), 0)
        self.mask, self.edits = named_mask(self._source, tree.mask, at)
        need_order(self._source, tree, hoisted=bool(self.edits))
        parts = tree.parts().keys() - {"M"}
        self.flows = not facts.holds(
            lambda v: not v.grad or not any(getattr(v, p).requires_grad for p in parts)
        )
        if self.flows and not self.edits:
            _check_unchanged(self._source, tree.mask)

    def kept(self, text: str, other: str) -> str:
        """Return a text of the tree's shape, with another value at unselected elements."""
        return f"{self._torch}.where({widened(self.mask, self.behind)}, {text}, {other})"

    def text(
        self,
        inner: ast.expr,
        also: Mapping[ast.AST, str] | None = None,
        after: tuple[ast.AST, str] | None = None,
    ) -> str:
        """Return the expression over all elements.

        `also` maps more nodes to their new texts; `after` appends a text to one node.
        """
        new = self._texts()
        parts = dict(also or {}) | {part: new[part] for part in new if within(part, inner)}
        if after is not None:
            node, more = after
            own = {part: parts.pop(part) for part in list(parts) if within(part, node)}
            parts[node] = spliced(self._source, node, own) + more
        return spliced(self._source, inner, parts)

    def elsewhere(self, inner: ast.expr) -> Iterator[TextEdit]:
        """Yield the edits of the tree's parts outside the expression, in the values of names."""
        for node, text in self._texts(everywhere=True).items():
            if not within(node, inner):
                yield TextEdit.of(self._source, node, text)

    def _texts(self, *, everywhere: bool = False) -> dict[ast.AST, str]:
        """Return the new texts of leaves and of operands that need a harmless value."""
        leaves, operands = enumerate(self._tree.leaves), enumerate(self._tree.operands)
        texts: dict[ast.AST, str] = {
            leaf.node: self.leaf(number, everywhere=everywhere) for number, (leaf, _) in leaves
        }
        guarded = ((number, one) for number, one in operands if self._guards(number))
        return texts | {one.node: self._operand(number) for number, one in guarded}

    def _guards(self, number: int) -> bool:
        """Return True if an operand needs a harmless value because a gradient flows into it."""
        graded = not self._facts.holds(
            lambda v: not v.grad or not getattr(v, f"C{number}").requires_grad
        )
        return self.flows and self._facts.seen and graded

    def leaf(self, number: int, *, everywhere: bool = False, name: str = "") -> str:
        """Return one of the tensors that were selected from, whole. `name`: its current name, if any."""
        found, lost = self._tree.leaves[number]
        part = tensor_part(number)
        if not (everywhere or self._tree.guarded or self.flows):
            return name or atom(self._source, found.tensor)
        of_truths = self._facts.holds(lambda v: getattr(v, part).dtype == "bool")
        text = name or self._source.segment(found.tensor)
        return self._guarded(text, lost, "True" if of_truths else "1")

    def _operand(self, number: int) -> str:
        node, lost = self._tree.operands[number]
        self._facts.need(
            f"`{self._source.segment(node)[:60]}`, which receives gradients, has the type of the "
            "selection",
            lambda v: (
                not self._tree.casts
                and all(
                    getattr(v, tensor_part(n)).dtype == getattr(v, f"C{number}").dtype
                    for n in range(len(self._tree.leaves))
                )
            ),
        )
        return self._guarded(self._source.segment(node), lost, "1")

    def _guarded(self, text: str, lost: int, value: str) -> str:
        return f"{self._torch}.where({widened(self.mask, self.behind + lost)}, {text}, {value})"


def _check_unchanged(source: SourceFile, mask: ast.expr) -> None:
    """Raise `FixRefused` if the function changes the mask in place before backward may run."""
    for node in ast.walk(source.function(mask)):
        changed = _changed(node)
        if changed is None or not any(equal(changed, part) for part in ast.walk(mask)):
            continue
        if source.start(node) > source.start(mask) or _comes_round(source, node, mask, changed):
            raise FixRefused(
                f"line {changed.lineno} changes the mask in place, and backward would need its old "
                "value here. Create a new mask there"
            )


def _changed(node: ast.AST) -> ast.expr | None:
    changed: ast.expr | None = None
    if isinstance(node, ast.AugAssign):
        changed = node.target
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        changed = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        own = node.func.attr.endswith("_") and not node.func.attr.endswith("__")
        changed = node.func.value if own else None
    while isinstance(changed, ast.Subscript):
        changed = changed.value
    return changed


def _comes_round(source: SourceFile, node: ast.AST, mask: ast.expr, changed: ast.AST) -> bool:
    """Return True if a loop repeats the change after the mask, without rebinding the name."""
    around = set(source.around(mask))
    shared = (one for one in source.around(node) if isinstance(one, Loop) and one in around)
    if (loop := next(shared, None)) is None:
        return False
    bound = stores(loop, changed.id) if isinstance(changed, ast.Name) else ()
    return all(isinstance(source.parents[store], ast.AugAssign) for store in bound)


def named_mask(source: SourceFile, mask: ast.expr, at: ast.AST) -> tuple[str, tuple[TextEdit, ...]]:
    """Return a text that may be written any number of times for the mask, and the statement it needs."""
    if not is_pure(mask, source):
        raise FixRefused(
            f"`{source.segment(mask)[:60]}` may have a side effect, and would run once. Assign "
            "its result to a name first"
        )
    return hoisted(source, mask, "kept", at=at)


def hoisted(
    source: SourceFile, node: ast.expr, name: str, *, at: ast.AST
) -> tuple[str, tuple[TextEdit, ...]]:
    """Return a text that may be written for the node any number of times: itself if simple, or a name.

    The returned edit assigns the name in a statement before `at`.
    """
    if is_simple(node):
        return atom(source, node), ()
    new = fresh(source, node, name)
    return new, (insert_before(source, at, f"{new} = {source.segment(node)}"),)


def need_order(source: SourceFile, tree: Tree, *, hoisted: bool) -> None:
    """Raise `FixRefused` if a side effect would run at another time than the mask."""
    own = is_own(source, tree.mask) and not hoisted
    given = [leaf.tensor for leaf, _ in tree.leaves] + [part.node for part in tree.operands]
    for node in given:
        if not own and not is_pure(node, source):
            raise FixRefused(
                f"`{source.segment(node)[:60]}` may have a side effect, and its order relative to the "
                "mask would change. Assign its result, or the mask, to a name first"
            )


def is_own(source: SourceFile, node: ast.expr) -> bool:
    """Return True for a name that only the function itself can bind."""
    function = source.function(node)
    if not isinstance(node, ast.Name) or not isinstance(function, Function):
        return False
    return node.id in source.bound(function) and not _is_declared(function, node.id)


def _is_declared(function: ast.AST, name: str) -> bool:
    return any(
        isinstance(one, ast.Global | ast.Nonlocal) and name in one.names
        for one in ast.walk(function)
    )


def widened(mask: str, behind: int) -> str:
    """Return the mask's text with trailing dimensions of size one, so that it broadcasts against rows."""
    return mask if behind <= 0 else f"{mask}[..., {', '.join(['None'] * behind)}]"


def spliced(source: SourceFile, node: ast.AST, parts: Mapping[ast.AST, str]) -> str:
    """Return the node's text with some of its parts replaced."""
    edits = (TextEdit.of(source, part, text) for part, text in parts.items())
    return applied(source.text, edits, source.start(node), source.end(node))


def named_values(source: SourceFile, node: ast.expr) -> dict[str, ast.Assign]:
    """Return assignments of selections, or of values computed from them, that only this expression reads.

    They are in earlier statements of the same block, with only pure assignments in between that do not rebind
    their inputs; nothing in the expression's own statement has an effect before it. One such name may be used
    in the value of another.
    """
    function = source.function(node)
    is_function = isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    if not is_function or not runs_first(source, node):
        return {}
    block = source.block(source.statement(node))
    inside, read = set(ast.walk(node)), names_in(node)
    named: dict[str, ast.Assign] = {}
    bound: set[str] = set()
    for statement in reversed(block[: block.index(source.statement(node))]):
        if not isinstance(statement, ast.Assign):
            break
        name = assigned_name(statement)
        if name is not None and name in read:
            if names_in(statement.value) & bound:
                break
            single = len(stores(function, name)) == 1 and not _is_declared(function, name)
            if single and inside.issuperset(loads(function, name)):
                named[name] = statement
                inside.update(ast.walk(statement.value))
                read |= names_in(statement.value)
        plain = all(isinstance(target, ast.Name) for target in statement.targets)
        if not plain or not is_pure(statement.value, source):
            break
        bound |= names_bound(statement)
    return {name: one for name, one in named.items() if _selects(source, one.value, named)}


def _selects(source: SourceFile, value: ast.expr, named: dict[str, ast.Assign]) -> bool:
    others = (named[name].value for name in names_in(value) & named.keys())
    return any(selection(part, source) is not None for part in ast.walk(value)) or any(
        other is not value and _selects(source, other, named) for other in others
    )
