"""What an expression would give that did not run: its type, shape, and which tensors its gradient reaches.

It is computed with tensors that have no data, by the facts that are known of its names.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from torchtrim.records.seen import Seen
from torchtrim.source.facts import Values
from torchtrim.source.source import Source
from torchtrim.source.total import is_total


def _torch() -> Any:
    """PyTorch, which is there wherever facts are, since a run gave them; `lint` needs none."""
    return import_module("torch")


class Typed(NamedTuple):
    """A tensor that an expression would give, and the texts of those that its gradient reaches."""

    dtype: str
    shape: tuple[int, ...]
    reached: frozenset[str]


_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}


class _Unknown(Exception):
    """Something in the expression is not known."""


_MEANS_UNKNOWN = (
    *(_Unknown, RuntimeError, TypeError, ValueError, IndexError, AttributeError),
    ArithmeticError,
)


def typed(
    node: ast.expr, source: Source, known: Mapping[str, Seen], before: Iterable[ast.Assign] = ()
) -> Typed | None:
    """What it would give after the assignments; None where that is not known.

    `known` is what was seen of names and attributes, by their text.
    """
    torch = _torch()
    if not all(is_total(one, source) for one in (node, *(assign.value for assign in before))):
        return None
    values = {text: _value(seen) for text, seen in known.items()}
    leaves = {text: one for text, one in values.items() if _requires_grad(one)}
    space = _Space(source, dict(values))
    try:
        with torch.enable_grad():
            for assign in before:
                space.values[ast.unparse(assign.targets[0])] = space.value(assign.value)
            result = space.value(node)
            if not isinstance(result, torch.Tensor) or result.device.type != "meta":
                return None
            reached = frozenset(_reached(result, leaves))
    except _MEANS_UNKNOWN:
        return None
    return Typed(str(result.dtype).removeprefix("torch."), tuple(result.shape), reached)


def holds(
    test: ast.expr, source: Source, known: Mapping[str, Seen], before: Iterable[ast.Assign] = ()
) -> bool:
    """Whether a test of ranks and types is known to hold after the assignments."""
    space = _Space(source, {text: _value(seen) for text, seen in known.items()})
    try:
        for assign in before:
            space.values[ast.unparse(assign.targets[0])] = space.value(assign.value)
        return all(map(space.compares, test.values if isinstance(test, ast.BoolOp) else [test]))
    except _MEANS_UNKNOWN:
        return False


def names_in(node: ast.AST, source: Source) -> Iterator[ast.expr]:
    """The names and attributes that a value is made of, outermost."""
    if isinstance(node, ast.Name | ast.Attribute) and _is_chain(node):
        if source.dotted(node) is None:
            yield node
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from names_in(node.func.value, source)
        for one in (*node.args, *node.keywords):
            yield from names_in(one, source)
        return
    for child in ast.iter_child_nodes(node):
        yield from names_in(child, source)


def _is_chain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def known_names(parts: Mapping[str, ast.expr], values: Values) -> dict[str, Seen]:
    """What was seen of the parts that are names and attributes, by their text.

    Types and shapes are left out: they follow from the tensor that has them.
    """
    return {
        ast.unparse(node): seen
        for part, node in parts.items()
        if isinstance(node, ast.Name | ast.Attribute)
        and (seen := getattr(values, part, None)) is not None
        and seen.kind not in ("dtype", "Size")
    }


class _Space:
    def __init__(self, source: Source, values: dict[str, Any]) -> None:
        self._source = source
        self.values = values

    def value(self, node: ast.AST | None) -> Any:
        if (
            isinstance(node, ast.Name | ast.Attribute)
            and (text := ast.unparse(node)) in self.values
        ):
            return self.values[text]
        if node is None or isinstance(node, ast.Constant):
            return node.value if node is not None else None
        if isinstance(node, ast.Tuple | ast.List):
            return [self.value(one) for one in node.elts]
        if isinstance(node, ast.BinOp):
            return self._operated(_BINARY[type(node.op)], node.left, node.right)
        if isinstance(node, ast.Compare):
            return self._operated(_BINARY[type(node.ops[0])], node.left, node.comparators[0])
        if isinstance(node, ast.UnaryOp):
            return _UNARY[type(node.op)](self.value(node.operand))
        if isinstance(node, ast.Call):
            words = {str(word.arg): self.value(word.value) for word in node.keywords}
            return self.value(node.func)(*map(self.value, node.args), **words)
        if isinstance(node, ast.Subscript):
            return self.value(node.value)[self._index(node.slice)]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        raise _Unknown

    def compares(self, test: ast.expr) -> bool:
        """Whether values of Python's are equal, or one is a tensor."""
        if isinstance(test, ast.Call):
            return self.value(test) is True
        if not isinstance(test, ast.Compare) or not all(isinstance(o, ast.Eq) for o in test.ops):
            raise _Unknown
        values = [self.value(one) for one in (test.left, *test.comparators)]
        return all(one == values[0] for one in values)

    def _operated(self, function: Callable[[Any, Any], Any], left: ast.AST, right: ast.AST) -> Any:
        torch = _torch()
        one, other = self.value(left), self.value(right)
        if not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor):
            raise _Unknown
        return function(one, other)

    def _index(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Slice):
            return slice(*(self.value(part) for part in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Tuple):
            return tuple(self._index(one) for one in node.elts)
        return self.value(node)

    def _attribute(self, node: ast.Attribute) -> Any:
        torch = _torch()
        dotted = self._source.dotted(node)
        if dotted is None:
            return getattr(self.value(node.value), node.attr)
        first, *names = dotted.split(".")
        if first != "torch":
            raise _Unknown
        found: Any = torch
        for name in names:
            found = getattr(found, name)
        return found


def _value(seen: Seen) -> Any:
    torch = _torch()
    if seen.kind in ("tensor", "Parameter"):
        dtype = getattr(torch, seen.dtype)
        return torch.empty(seen.shape, dtype=dtype, device="meta", requires_grad=seen.requires_grad)
    plain: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": "True".__eq__}
    return plain[seen.kind](seen.value) if seen.kind in plain else None


def _requires_grad(value: Any) -> bool:
    return bool(getattr(value, "requires_grad", False))


def _reached(result: Any, leaves: Mapping[str, Any]) -> Iterable[str]:
    torch = _torch()
    if not result.requires_grad:
        return
    grads = torch.autograd.grad(result.sum(), list(leaves.values()), allow_unused=True)
    yield from (text for text, grad in zip(leaves, grads, strict=True) if grad is not None)
