"""Detects Python numbers from the source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.source.names import assigned_to, stores
from torchtrim.source.nodes import called, find_all, function_of, name_set
from torchtrim.source.source import Function, SourceFile

_TYPES = name_set("int float bool Number Real Integral")
_COUNTING = name_set("item numel dim element_size ndimension")
_MAKING = name_set("int float bool len ord hash id")


def is_known_number(node: ast.expr, source: SourceFile) -> bool:
    """Return True if a literal, a conversion, an annotation or `isinstance` shows a Python number."""
    return _is_number(node, source, frozenset())


def _is_number(node: ast.expr, source: SourceFile, open_names: frozenset[str]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Name):
        return _tested(node, source) or _only_numbers(node, source, open_names)
    if isinstance(node, ast.Call):
        return _makes(node, source)
    if isinstance(node, ast.Subscript):
        sized = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        return sized and not isinstance(node.slice, ast.Slice | ast.Tuple)
    operands = _operands(node)
    return bool(operands) and all(_is_number(one, source, open_names) for one in operands)


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else []


def _makes(node: ast.Call, source: SourceFile) -> bool:
    if isinstance(node.func, ast.Name):
        rebound = stores(source.function(node), node.func.id) or source.dotted(node.func)
        return node.func.id in _MAKING and not rebound
    if not isinstance(node.func, ast.Attribute):
        return False
    if (source.dotted(node.func) or "").startswith("math."):
        return True
    sized = node.func.attr == "size" and len(node.args) == 1
    return sized or (node.func.attr in _COUNTING and not node.args and not node.keywords)


def _tested(node: ast.Name, source: SourceFile) -> bool:
    """Return True if an `isinstance` around this use finds a number, and no store in between rebinds it."""
    below: ast.AST = node
    for outer in source.around(node):
        if isinstance(outer, ast.If | ast.IfExp):
            body: list[ast.AST] = [*outer.body] if isinstance(outer, ast.If) else [outer.body]
            if below in body and _finds(outer.test, node.id):
                between = range(outer.lineno, node.lineno)
                bound = stores(source.function(node), node.id)
                return not any(store.lineno in between for store in bound)
        below = outer
    return False


def _finds(test: ast.expr, name: str) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_finds(part, name) for part in test.values)
    return (
        isinstance(test, ast.Call)
        and function_of(test) == "isinstance"
        and len(test.args) == 2
        and ast.unparse(test.args[0]) == name
        and _are_types(test.args[1])
    )


def _are_types(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return all(map(_are_types, node.elts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _are_types(node.left) and _are_types(node.right)
    return (node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)) in _TYPES


def _only_numbers(node: ast.Name, source: SourceFile, open_names: frozenset[str]) -> bool:
    """Return True if each value bound to the name is a number, as is a parameter's annotation."""
    function, name = source.function(node), node.id
    if not isinstance(function, Function) or name in open_names:
        return False
    given = [one for one in find_all(function.args, ast.arg) if one.arg == name]
    bound, known = stores(function, name), open_names | {name}
    return (
        bool(given or bound)
        and all(_annotated(parameter.annotation) for parameter in given)
        and all(_is_given_number(store, source, known) for store in bound)
    )


def _annotated(node: ast.expr | None) -> bool:
    """Return True for an annotation of numbers, None and literal strings: only numbers make tensors."""
    every = list(_alternatives(node))
    left = [one for one in every if not _is_literal(one, str, type(None))]
    return bool(left) and all(_is_literal(one, int, float) or _are_types(one) for one in left)


def _is_literal(node: ast.expr, *kinds: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kinds)


def _alternatives(node: ast.expr | None) -> Iterator[ast.expr]:
    """Yield the types in an annotation, and the values of a `Literal`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            yield from _alternatives(ast.parse(node.value.strip(), mode="eval").body)
        except SyntaxError:
            yield ast.Name(node.value)
    elif isinstance(node, ast.BinOp):
        yield from (*_alternatives(node.left), *_alternatives(node.right))
    elif isinstance(node, ast.Subscript) and called(node.value) in ("Optional", "Union", "Literal"):
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for one in inside:
            yield from [one] if called(node.value) == "Literal" else _alternatives(one)
    elif node is not None:
        yield node


def _is_given_number(target: ast.Name, source: SourceFile, known: frozenset[str]) -> bool:
    outer = source.parents[target]
    if isinstance(outer, ast.For) and outer.target is target:
        return function_of(outer.iter) == "range"
    if isinstance(outer, ast.AugAssign):
        return _is_number(outer.value, source, known)
    value = assigned_to(source, target)
    # A name that is computed from itself is a number if it was one.
    return value is not None and _is_number_or(value, source, known)


def _is_number_or(value: ast.expr, source: SourceFile, known: frozenset[str]) -> bool:
    if isinstance(value, ast.Name) and value.id in known:
        return True
    if operands := _operands(value):
        return all(_is_number_or(one, source, known) for one in operands)
    return _is_number(value, source, known)
