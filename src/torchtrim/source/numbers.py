"""Detects Python numbers from the source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from torchtrim.source.names import assigned_to, stores
from torchtrim.source.source import Function, SourceFile

_TYPES = frozenset(("int", "float", "bool", "Number", "Real", "Integral"))
_COUNTING = frozenset(("item", "numel", "dim", "element_size", "ndimension"))
_MAKING = frozenset(("int", "float", "bool", "len", "ord", "hash", "id"))


def is_known_number(node: ast.expr, source: SourceFile) -> bool:
    """Return True if the source shows a Python number: a literal, a conversion, an annotation or
    `isinstance`.
    """
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
    inner = _operands(node)
    return bool(inner) and all(_is_number(one, source, open_names) for one in inner)


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else []


def _makes(node: ast.Call, source: SourceFile) -> bool:
    if isinstance(node.func, ast.Name):
        return node.func.id in _MAKING and not _is_bound(source, node.func)
    if not isinstance(node.func, ast.Attribute):
        return False
    if (source.dotted(node.func) or "").startswith("math."):
        return True
    sized = node.func.attr == "size" and len(node.args) == 1
    return sized or (node.func.attr in _COUNTING and not node.args and not node.keywords)


def _is_bound(source: SourceFile, name: ast.Name) -> bool:
    """Return True if the function or the file rebinds a builtin name."""
    return bool(stores(source.function(name), name.id)) or source.dotted(name) is not None


def _tested(node: ast.Name, source: SourceFile) -> bool:
    """Return True if an enclosing `isinstance` test finds a number and the name is not rebound before this
    use.
    """
    below: ast.AST = node
    for outer in source.around(node):
        if isinstance(outer, ast.If | ast.IfExp):
            body = outer.body if isinstance(outer.body, list) else [outer.body]
            inside = any(one is below for one in body)
            if inside and any(_finds(part, node.id) for part in _all_of(outer.test)):
                given = (one.lineno for one in stores(source.function(node), node.id))
                return not any(outer.lineno <= line < node.lineno for line in given)
        below = outer
    return False


def _all_of(test: ast.expr) -> Iterable[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _finds(test: ast.expr, name: str) -> bool:
    if not (isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"):
        return False
    if len(test.args) != 2 or ast.unparse(test.args[0]) != name:
        return False
    return _are_types(test.args[1])


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
    given = [one for one in ast.walk(function.args) if isinstance(one, ast.arg) and one.arg == name]
    bound = stores(function, name)
    if not all(_annotated(one.annotation) for one in given):
        return False
    known = open_names | {name}
    return bool(given or bound) and all(_is_given_number(one, source, known) for one in bound)


def _annotated(node: ast.expr | None) -> bool:
    """Return True for an annotation of numbers, or numbers and None: a tensor is never None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.strip() in _TYPES
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Optional"):
        return _annotated(node.slice)
    if isinstance(node, ast.BinOp):
        sides = [one for one in (node.left, node.right) if ast.unparse(one) != "None"]
        return bool(sides) and all(map(_annotated, sides))
    return node is not None and _are_types(node)


def _is_given_number(target: ast.Name, source: SourceFile, known: frozenset[str]) -> bool:
    outer = source.parents[target]
    if isinstance(outer, ast.For) and outer.target is target:
        return isinstance(outer.iter, ast.Call) and ast.unparse(outer.iter.func) == "range"
    if isinstance(outer, ast.AugAssign):
        return _is_number(outer.value, source, known)
    value = assigned_to(source, target)
    # A name that is computed from itself is a number if it was one.
    return value is not None and _is_number_or(value, source, known)


def _is_number_or(value: ast.expr, source: SourceFile, known: frozenset[str]) -> bool:
    if isinstance(value, ast.Name) and value.id in known:
        return True
    inner = _operands(value)
    if inner:
        return all(_is_number_or(one, source, known) for one in inner)
    return _is_number(value, source, known)
