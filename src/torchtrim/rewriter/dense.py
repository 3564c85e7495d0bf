"""Writes a computation on selected elements as one on all, the others kept harmless."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from torchtrim.rewriter.fix import Edit, Match
from torchtrim.rewriter.replace import atom, fresh, insert_before
from torchtrim.source.facts import Facts, Refused, Values
from torchtrim.source.forms import equal
from torchtrim.source.purity import is_pure, is_simple
from torchtrim.source.selections import Tree, tensor_part, trailing
from torchtrim.source.source import Function, Source, within
from torchtrim.source.uses import stores

_REPEATED = "its number of dimensions"


class Dense:
    """The text of a tree over all elements.

    `at` is where the mask may get a name, in a statement before, if it is more than a name. `torch` is
    what the file calls torch. `flows`: gradients flow through the result, or may; to be made false
    where they cannot. Then all tensors are given a harmless value where nothing is selected. That they
    are also copied keeps what backward needs from later changes in place, as the selection did.
    """

    def __init__(self, match: Match, facts: Facts, tree: Tree, *, at: ast.AST, torch: str) -> None:
        self._match, self._facts, self._tree = match, facts, tree
        self._source = match.source
        self._torch = torch
        self.behind = facts.only(_REPEATED, lambda v: trailing(v, tree), 0)
        self.mask, self.edits = named_mask(self._source, tree.mask, at)
        need_order(self._source, tree, hoisted=bool(self.edits))
        self.flows = not facts.holds(lambda v: not _flows(v, tree))
        if self.flows and not self.edits:
            _check_unchanged(self._source, tree.mask)

    def kept(self, text: str, other: str) -> str:
        """A text of the tree's shape, with another value where nothing is selected."""
        return f"{self._torch}.where({widened(self.mask, self.behind)}, {text}, {other})"

    def text(
        self,
        inner: ast.expr,
        also: Mapping[ast.AST, str] | None = None,
        after: tuple[ast.AST, str] | None = None,
    ) -> str:
        """The expression over all elements.

        `also`: more parts of it to write otherwise; `after`: what to write behind one of its parts.
        """
        parts: dict[ast.AST, str] = dict(also or {})
        for number in range(len(self._tree.leaves)):
            leaf = self._tree.leaves[number][0].node
            if within(leaf, inner):
                parts[leaf] = self.leaf(number)
        for number, operand in enumerate(self._tree.operands):
            if self._guards(number) and within(operand.node, inner):
                parts[operand.node] = self._operand(number)
        if after is not None:
            node, more = after
            parts[node] = spliced(
                self._source, node, {p: t for p, t in parts.items() if within(p, node)}
            )
            parts = {p: t for p, t in parts.items() if p is node or not within(p, node)}
            parts[node] += more
        return spliced(self._source, inner, parts)

    def elsewhere(self, inner: ast.expr) -> Iterator[Edit]:
        """The edits of what the tree has outside the expression, in the values of names."""
        texts: dict[ast.AST, str] = {}
        for number, (leaf, _) in enumerate(self._tree.leaves):
            texts[leaf.node] = self.leaf(number, everywhere=True)
        for number, operand in enumerate(self._tree.operands):
            if self._guards(number):
                texts[operand.node] = self._operand(number)
        for node, text in texts.items():
            if not within(node, inner):
                yield Edit(self._source.start(node), self._source.end(node), text)

    def _guards(self, number: int) -> bool:
        """Whether an operand needs a harmless value, since a gradient flows into it."""
        return self.flows and self._facts.seen and self._takes_gradient(f"C{number}")

    def leaf(self, number: int, *, everywhere: bool = False, name: str = "") -> str:
        """One of the tensors that were selected from, whole. `name`: what it is called by now."""
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
            f"`{self._source.segment(node)[:60]}`, into which gradients flow, has the type of the "
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

    def _takes_gradient(self, part: str) -> bool:
        return not self._facts.holds(lambda v: not (v.grad and getattr(v, part).requires_grad))


def _flows(values: Values, tree: Tree) -> bool:
    parts = [tensor_part(n) for n in range(len(tree.leaves))]
    parts += [f"C{n}" for n in range(len(tree.operands))]
    return values.grad and any(getattr(values, part).requires_grad for part in parts)


def _check_unchanged(source: Source, mask: ast.expr) -> None:
    """Raises `Refused` where the function changes the mask in place after it, before backward may run."""
    for node in ast.walk(source.function(mask)):
        changed = _changed(node)
        if changed is None or not any(equal(changed, part) for part in ast.walk(mask)):
            continue
        if source.start(node) > source.start(mask) or _comes_round(source, node, mask, changed):
            raise Refused(
                f"line {node.lineno} changes the mask in place, and backward would need it as it was "  # type: ignore[attr-defined]
                "here. Make a new mask there"
            )


def _changed(node: ast.AST) -> ast.AST | None:
    """The tensor that a node of the tree changes in place."""
    changed: ast.AST | None = None
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


def _comes_round(source: Source, node: ast.AST, mask: ast.expr, changed: ast.AST) -> bool:
    """Whether a loop brings the change after the mask, and gives it no new value before."""
    around = {id(outer) for outer in source.around(mask)}
    for outer in source.around(node):
        if isinstance(outer, ast.For | ast.While | ast.AsyncFor) and id(outer) in around:
            name = changed.id if isinstance(changed, ast.Name) else ""
            new = [one for one in stores(outer, name) if not _is_added_to(source, one)]
            return not new
    return False


def _is_added_to(source: Source, node: ast.AST) -> bool:
    return isinstance(source.parents[node], ast.AugAssign)


def named_mask(source: Source, mask: ast.expr, at: ast.AST) -> tuple[str, tuple[Edit, ...]]:
    """A text to write for the mask as often as wanted, and the statement before that it needs."""
    if not is_pure(mask, source):
        raise Refused(
            f"`{source.segment(mask)[:60]}` may do more than compute a mask, and would run once instead of "
            "several times, or at another time. Give its result a name first"
        )
    return hoisted(source, mask, "kept", at=at)


def hoisted(
    source: Source, node: ast.expr, name: str, *, at: ast.AST
) -> tuple[str, tuple[Edit, ...]]:
    """A text to write for the node as often as wanted: itself if it is simple, or a name.

    The name is given in a statement before `at`, with the edit that is returned.
    """
    if is_simple(node):
        return atom(source, node), ()
    new = fresh(source, node, name)
    return new, (insert_before(source, at, f"{new} = {source.segment(node)}"),)


def need_order(source: Source, tree: Tree, *, hoisted: bool) -> None:
    """Raises `Refused` where something with an effect would run at another time than the mask."""
    own = is_own(source, tree.mask) and not hoisted
    given = [leaf.tensor for leaf, _ in tree.leaves] + [part.node for part in tree.operands]
    for node in given:
        if not own and not is_pure(node, source):
            raise Refused(
                f"`{source.segment(node)[:60]}` may do more than compute a value, and would run before or "
                "after the mask where it ran otherwise. Give its result, or the mask, a name first"
            )


def is_own(source: Source, node: ast.expr) -> bool:
    """Whether it is a name that only the function itself can bind."""
    function = source.function(node)
    if not isinstance(node, ast.Name) or not isinstance(function, Function):
        return False
    shared = (one for one in ast.walk(function) if isinstance(one, ast.Global | ast.Nonlocal))
    return node.id in source.bound(function) and not any(node.id in one.names for one in shared)


def widened(mask: str, behind: int) -> str:
    """The mask's text with dimensions of size one behind, so that it broadcasts against rows."""
    return mask if behind <= 0 else f"{mask}[..., {', '.join(['None'] * behind)}]"


def spliced(source: Source, node: ast.AST, parts: Mapping[ast.AST, str]) -> str:
    """The node's text with other texts in the place of some of its parts."""
    at = source.start(node)
    text = []
    for part in sorted(parts, key=source.start):
        text += [source.text[at : source.start(part)], parts[part]]
        at = source.end(part)
    return "".join([*text, source.text[at : source.end(node)]])
