"""Types, shapes and gradients of expressions that did not run.

`typed` computes them on meta tensors from the facts known of the names. `common_form` compares two
expressions by the source alone: each gets a form of its tensors and of what promotes their type, without the
values of numbers. Expressions of one form have one type and shape, and raise for the same types and shapes.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.source.facts import Values
from torchtrim.source.nodes import constant_of, find_all
from torchtrim.source.operations import is_total, operands_of
from torchtrim.source.source import SourceFile


def _torch() -> Any:
    """Return PyTorch. A run that gave facts had it installed; `lint`, without facts, needs no torch."""
    return import_module("torch")


class TensorType(NamedTuple):
    """The type and shape of an expression's tensor, and the texts of the tensors its gradient reaches."""

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


class _UnknownValue(Exception):
    """The value of a part of the expression is unknown."""


_MEANS_UNKNOWN = (
    *(_UnknownValue, RuntimeError, TypeError, ValueError, IndexError, AttributeError),
    ArithmeticError,
)


def typed(
    node: ast.expr,
    source: SourceFile,
    known: Mapping[str, ObservedValue],
    before: Iterable[ast.Assign] = (),
) -> TensorType | None:
    """Infer the tensor that an expression would return after the assignments, or None if that is unknown.

    `known` holds the observed names and attributes, by their text.
    """
    torch = _torch()
    if not all(is_total(one, source) for one in (node, *(assign.value for assign in before))):
        return None
    values = {text: _value(seen) for text, seen in known.items()}
    leaves = {text: one for text, one in values.items() if getattr(one, "requires_grad", False)}
    try:
        with torch.enable_grad():
            result = _Namespace(source, dict(values), before).value(node)
            if not isinstance(result, torch.Tensor) or result.device.type != "meta":
                return None
            grads: Iterable[Any] = ()
            if result.requires_grad:
                grads = torch.autograd.grad(result.sum(), list(leaves.values()), allow_unused=True)
            reached = {text for text, grad in zip(leaves, grads, strict=False) if grad is not None}
    except _MEANS_UNKNOWN:
        return None
    dtype = str(result.dtype).removeprefix("torch.")
    return TensorType(dtype, tuple(result.shape), frozenset(reached))


def operands_in(node: ast.AST, source: SourceFile) -> Iterator[ast.expr]:
    """Yield the outermost names and attributes that a value depends on."""
    if isinstance(node, ast.Name | ast.Attribute) and _is_chain(node):
        if source.dotted(node) is None:
            yield node
        return
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        children = (node.func.value, *node.args, *node.keywords)
    for child in children:
        yield from operands_in(child, source)


def _is_chain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def known_names(parts: Mapping[str, ast.expr], values: Values) -> dict[str, ObservedValue]:
    """Return the observed parts that are names or attributes, by text, except types and shapes of tensors."""
    return {
        ast.unparse(node): seen
        for part, node in parts.items()
        if isinstance(node, ast.Name | ast.Attribute)
        and (seen := getattr(values, part, None)) is not None
        and seen.kind not in ("dtype", "Size")
    }


class _Namespace:
    """The values of names and attributes, by their text, after some assignments."""

    def __init__(
        self, source: SourceFile, values: dict[str, Any], before: Iterable[ast.Assign]
    ) -> None:
        self._source = source
        self._values = values
        for assign in before:
            self._values[ast.unparse(assign.targets[0])] = self.value(assign.value)

    def value(self, node: ast.AST | None) -> Any:
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in self._values:
            return self._values[ast.unparse(node)]
        if node is None or isinstance(node, ast.Constant):
            return constant_of(node)
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
        raise _UnknownValue

    def _operated(self, function: Callable[[Any, Any], Any], left: ast.AST, right: ast.AST) -> Any:
        sides = self.value(left), self.value(right)
        if not any(isinstance(side, _torch().Tensor) for side in sides):
            raise _UnknownValue
        return function(*sides)

    def _index(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Slice):
            return slice(*(self.value(part) for part in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Tuple):
            return tuple(self._index(one) for one in node.elts)
        return self.value(node)

    def _attribute(self, node: ast.Attribute) -> Any:
        if (dotted := self._source.dotted(node)) is None:
            return getattr(self.value(node.value), node.attr)
        if not dotted.startswith("torch."):
            raise _UnknownValue
        return attrgetter(dotted.removeprefix("torch."))(_torch())


def _value(seen: ObservedValue) -> Any:
    torch = _torch()
    if seen.kind in ("tensor", "Parameter"):
        dtype = getattr(torch, seen.dtype)
        return torch.empty(seen.shape, dtype=dtype, device="meta", requires_grad=seen.requires_grad)
    plain: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": "True".__eq__}
    return plain[seen.kind](seen.value) if seen.kind in plain else None


_ROOTS = ("exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid")
_LARGEST = 127  # the largest number that every integer type holds


class _UnknownForm(Exception):
    """The source does not determine the form."""


class TypeForm(NamedTuple):
    """The facts that determine type and shape; the texts of all operands, and of those with a gradient."""

    kind: Hashable
    operands: frozenset[str]
    reached: frozenset[str]


def common_form(one: ast.expr, other: ast.expr, source: SourceFile) -> TypeForm | None:
    """Return the form of both expressions, or None if they differ or the source does not determine it."""
    shared = _values_in(one) & _values_in(other)
    try:
        forms = {_form(node, source, shared) for node in (one, other)}
    except _UnknownForm:
        return None
    return forms.pop() if len(forms) == 1 else None


def _values_in(node: ast.expr) -> set[str]:
    parts = find_all(node, ast.expr)
    return {ast.unparse(part) for part in parts if not isinstance(part, ast.Constant)}


def _form(node: ast.expr, source: SourceFile, shared: set[str]) -> TypeForm:
    if (text := ast.unparse(node)) in shared:
        return TypeForm(text, frozenset([text]), frozenset([text]))
    if isinstance(node, ast.BinOp):
        return _operated(node, source, shared)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _without_truth(_form(node.operand, source, shared), "negative")
    if isinstance(node, ast.Call):
        return _called(node, source, shared)
    raise _UnknownForm


def _operated(node: ast.BinOp, source: SourceFile, shared: set[str]) -> TypeForm:
    sides = (node.left, node.right)
    numbers = [number for side in sides if (number := _number(side)) is not None]
    tensors = [_form(side, source, shared) for side in sides if _number(side) is None]
    if len(tensors) == 2:
        return _of_tensors(node.op, *tensors)
    if len(tensors) != 1:
        raise _UnknownForm
    form = tensors[0]
    if isinstance(node.op, ast.Sub):
        form = _without_truth(form, "less")
    elif not isinstance(node.op, ast.Add | ast.Mult | ast.Div):
        raise _UnknownForm
    floating = isinstance(numbers[0], float) or isinstance(node.op, ast.Div)
    return _promoted(form, "float" if floating else "int")


def _without_truth(form: TypeForm, name: str) -> TypeForm:
    return form if _is_promoted(form.kind) else form._replace(kind=(name, form.kind))


def _of_tensors(op: ast.operator, left: TypeForm, right: TypeForm) -> TypeForm:
    """Return the form of an operator between two tensors. Booleans cannot be subtracted."""
    kinds: Hashable
    if isinstance(op, ast.Div):
        kinds = ("divided", left.kind, right.kind)
    elif isinstance(op, ast.Add | ast.Mult | ast.Sub):
        safe = _is_promoted(left.kind) or _is_promoted(right.kind)
        name = "less" if isinstance(op, ast.Sub) and not safe else "with"
        kinds = (name, frozenset((left.kind, right.kind)))
    else:
        raise _UnknownForm
    return TypeForm(kinds, left.operands | right.operands, left.reached | right.reached)


def _called(node: ast.Call, source: SourceFile, shared: set[str]) -> TypeForm:
    name, operands = operands_of(node, source)
    if len(operands) != 1 or node.keywords:
        raise _UnknownForm
    form = _form(operands[0], source, shared)
    if name in _ROOTS:
        return _promoted(form, "float")
    if name in ("zeros_like", "ones_like") and source.dotted(node.func) is not None:
        return form._replace(reached=frozenset())
    if name == "clone":
        return form
    raise _UnknownForm


def _number(node: ast.expr) -> int | float | None:
    """Return a Python number that fits every type, or None."""
    value = node.value if isinstance(node, ast.Constant) else None
    if type(value) is int and value <= _LARGEST:
        return value
    return value if type(value) is float else None


def _promoted(form: TypeForm, to: str) -> TypeForm:
    """Return the form after an operation with a number. A float overrides any earlier integer."""
    if not isinstance(form.kind, tuple) or not _is_promoted(form.kind):
        return form._replace(kind=(to, form.kind))
    before, kind = form.kind
    return form._replace(kind=("float" if "float" in (before, to) else to, kind))


def _is_promoted(kind: Hashable) -> bool:
    return isinstance(kind, tuple) and kind[0] in ("int", "float")
