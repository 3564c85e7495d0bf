"""Whether two expressions agree in type, shape and gradient, by the source alone.

Each gets a form: the tensors in it and what promotes their type, without the values of numbers. Two
expressions of one form have one type and shape, and raise for the same types and shapes.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable
from typing import NamedTuple

from torchtrim.source.source import Source

_ROOTS = frozenset(("exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid"))
_CONSTANTS = frozenset(("zeros_like", "ones_like"))
_LARGEST = 127  # what the smallest integer type holds


class _Unknown(Exception):
    """The source does not tell."""


class Form(NamedTuple):
    """What decides type and shape, the texts of the operands, and of those a gradient reaches."""

    kind: Hashable
    operands: frozenset[str]
    reached: frozenset[str]


def common_form(one: ast.expr, other: ast.expr, source: Source) -> Form | None:
    """Return the form of both expressions, or None where they differ or the source does not tell."""
    shared = _values_in(one) & _values_in(other)
    try:
        forms = {_form(node, source, shared) for node in (one, other)}
    except _Unknown:
        return None
    return forms.pop() if len(forms) == 1 else None


def _values_in(node: ast.expr) -> set[str]:
    return {
        ast.unparse(part)
        for part in ast.walk(node)
        if isinstance(part, ast.expr) and not isinstance(part, ast.Constant)
    }


def _form(node: ast.expr, source: Source, shared: set[str]) -> Form:
    if (text := ast.unparse(node)) in shared:
        return Form(text, frozenset([text]), frozenset([text]))
    if isinstance(node, ast.BinOp):
        return _operated(node, source, shared)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _without_truth(_form(node.operand, source, shared), "negative")
    if isinstance(node, ast.Call):
        return _called(node, source, shared)
    raise _Unknown


def _operated(node: ast.BinOp, source: Source, shared: set[str]) -> Form:
    sides = (node.left, node.right)
    numbers = [number for one in sides if (number := _number(one)) is not None]
    tensors = [_form(one, source, shared) for one in sides if _number(one) is None]
    if len(tensors) == 2:
        return _of_tensors(node.op, *tensors)
    if len(tensors) != 1:
        raise _Unknown
    form = tensors[0]
    if isinstance(node.op, ast.Sub):
        form = _without_truth(form, "less")
    elif not isinstance(node.op, ast.Add | ast.Mult | ast.Div):
        raise _Unknown
    floating = isinstance(numbers[0], float) or isinstance(node.op, ast.Div)
    return _promoted(form, "float" if floating else "int")


def _without_truth(form: Form, name: str) -> Form:
    """The form before an operation that raises for truth values."""
    return form if _is_promoted(form.kind) else form._replace(kind=(name, form.kind))


def _of_tensors(op: ast.operator, left: Form, right: Form) -> Form:
    """The form of an operator between two values. Truth values have no difference."""
    kinds: Hashable
    if isinstance(op, ast.Div):
        kinds = ("divided", left.kind, right.kind)
    elif isinstance(op, ast.Add | ast.Mult | ast.Sub):
        safe = _is_promoted(left.kind) or _is_promoted(right.kind)
        name = "less" if isinstance(op, ast.Sub) and not safe else "with"
        kinds = (name, frozenset((left.kind, right.kind)))
    else:
        raise _Unknown
    return Form(kinds, left.operands | right.operands, left.reached | right.reached)


def _called(node: ast.Call, source: Source, shared: set[str]) -> Form:
    dotted = source.dotted(node.func)
    if dotted is None and isinstance(node.func, ast.Attribute):
        name, operands = node.func.attr, [node.func.value, *node.args]
    else:
        module, _, name = (dotted or "").rpartition(".")
        operands = list(node.args) if module == "torch" else []
    if len(operands) != 1 or node.keywords:
        raise _Unknown
    form = _form(operands[0], source, shared)
    if name in _ROOTS:
        return _promoted(form, "float")
    if name in _CONSTANTS and dotted is not None:
        return form._replace(reached=frozenset())
    if name == "clone":
        return form
    raise _Unknown


def _number(node: ast.expr) -> int | float | None:
    """A number of Python's that every type takes."""
    value = node.value if isinstance(node, ast.Constant) else None
    small = type(value) is float or (type(value) is int and value <= _LARGEST)
    return value if small else None  # type: ignore[return-value]


def _promoted(form: Form, to: str) -> Form:
    """The form after an operation with a number. One of a float decides whatever an integer did before."""
    if not isinstance(form.kind, tuple) or not _is_promoted(form.kind):
        return form._replace(kind=(to, form.kind))
    before, kind = form.kind
    return form._replace(kind=("float" if "float" in (before, to) else to, kind))


def _is_promoted(kind: Hashable) -> bool:
    return isinstance(kind, tuple) and kind[0] in ("int", "float")
