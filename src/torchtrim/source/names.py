"""Who else may see or write the value of a name in user code."""

from __future__ import annotations

import ast

from torchtrim.source.source import Function, Source
from torchtrim.source.tensor_methods import VALUES, VIEWS
from torchtrim.source.total import is_fresh
from torchtrim.source.uses import loads, stores

EVERYTHING: frozenset[str] = frozenset(["*"])
_WHOLE = frozenset(("locals", "globals", "vars", "eval", "exec", "dir"))
_READERS_NAMES = """
    abs bool float int isinstance len max min print range round str sum
"""
_READERS = frozenset(_READERS_NAMES.split())
_READING_MODULES = ("torch.", "math.", "numpy.", "statistics.")
_KEEPING = frozenset(["as_tensor", "asarray", "from_numpy", "save", "tensor_split"])


def is_private(source: Source, function: ast.AST, name: str) -> bool:
    """Whether only the function's own code sees the name: no function within, no `global`, no `locals()`."""
    known = source.private.get((function, name))
    if known is None:
        known = source.private[function, name] = _is_private(source, function, name)
    return known


def _is_private(source: Source, function: ast.AST, name: str) -> bool:
    declared = source.private_but.get(function)
    if declared is None:
        declared = source.private_but[function] = _seen_elsewhere(function)
    if declared is EVERYTHING or name in declared:
        return False
    uses = (*loads(function, name), *stores(function, name))
    return all(_is_own(source, function, node) for node in uses)


def _seen_elsewhere(function: ast.AST) -> frozenset[str]:
    """The names that a function declares as others'; everything where it looks at all its names."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _WHOLE:
            return EVERYTHING
    return frozenset(found)


def only_reads(source: Source, use: ast.Name) -> bool:
    """Whether nothing is written to, or kept of, the value of the name where it is used."""
    node: ast.AST = use
    outer = source.parents[node]
    if isinstance(outer, ast.Subscript) and outer.value is node:
        return isinstance(outer.ctx, ast.Load) and only_reads_at(source, outer)
    return only_reads_at(source, node)


def only_reads_at(source: Source, node: ast.AST) -> bool:
    """Whether what is around a value only reads it."""
    outer = source.parents[node]
    if isinstance(outer, ast.BinOp | ast.Compare | ast.UnaryOp | ast.FormattedValue):
        return True
    if isinstance(outer, ast.AugAssign):
        return outer.value is node
    if isinstance(outer, ast.Attribute):
        call = source.parents[outer]
        if isinstance(call, ast.Call) and call.func is outer:
            if outer.attr in VIEWS:
                return only_reads_at(source, call)
            return outer.attr in VALUES and outer.attr not in ("numpy", "conj", "sum_to_size")
        return outer.attr in ("shape", "dtype", "device", "ndim", "requires_grad")
    if isinstance(outer, ast.keyword):
        outer = source.parents[outer]
    if isinstance(outer, ast.Call):
        return _reading_call(source, outer)
    return isinstance(outer, ast.If | ast.While | ast.IfExp) and outer.test is node


def was_fresh(source: Source, name: str, statement: ast.stmt) -> bool:
    """Whether the name holds a tensor of its own at the statement.

    It does where an assignment before it, in the same block or one around it, made a new tensor that
    has only been read since.
    """
    function = source.function(statement)
    if not isinstance(function, Function) or not is_private(source, function, name):
        return False
    made = assignment_before(source, name, statement)
    if made is None or not is_fresh(made.value, source):
        return False
    since = [use for use in loads(function, name) if made.lineno < use.lineno < statement.lineno]
    between = [one for one in stores(function, name) if made.lineno < one.lineno < statement.lineno]
    loop = source.loop(statement)
    if loop is not None and source.loop(made) is not loop:
        return False
    return not between and all(only_reads(source, use) for use in since)


def literal_stores(source: Source, function: ast.AST, name: str) -> list[ast.Constant] | None:
    """The numbers that a name is given, where it is given nothing else but by `+=`; None otherwise."""
    found = []
    for node in stores(function, name):
        outer = source.parents[node]
        if isinstance(outer, ast.AugAssign):
            continue
        value = assigned_to(source, node)
        if not isinstance(value, ast.Constant) or type(value.value) not in (int, float):
            return None
        found.append(value)
    return found


def assigned_to(source: Source, target: ast.Name) -> ast.expr | None:
    """What an assignment gives to a name in it, in `a = b = 0` and `a, b = 0, 1` too."""
    outer = source.parents[target]
    if isinstance(outer, ast.Assign):
        return outer.value
    if isinstance(outer, ast.AnnAssign):
        return outer.value
    if isinstance(outer, ast.Tuple) and isinstance(assign := source.parents[outer], ast.Assign):
        value = assign.value
        if isinstance(value, ast.Tuple) and len(value.elts) == len(outer.elts):
            return value.elts[outer.elts.index(target)]
    return None


def _is_own(source: Source, function: ast.AST, node: ast.Name) -> bool:
    inner = source.function(node)
    while inner is not function:
        if node.id in source.bound(inner):
            return True
        if isinstance(inner, ast.Module):
            return False
        inner = source.function(inner)
        if inner is function:
            return False
    return True


def _reading_call(source: Source, call: ast.Call) -> bool:
    dotted = source.dotted(call.func)
    if dotted is not None:
        last = dotted.rpartition(".")[2]
        return (
            dotted.startswith(_READING_MODULES)
            and is_fresh(call, source) | dotted.startswith(("math.", "numpy.", "statistics."))
            and last not in _KEEPING
        )
    if isinstance(call.func, ast.Attribute):
        return is_fresh(call, source)
    return isinstance(call.func, ast.Name) and call.func.id in _READERS


def assignment_before(source: Source, name: str, statement: ast.stmt) -> ast.Assign | None:
    """The last assignment to the name alone that surely ran before the statement."""
    at: ast.stmt = statement
    while True:
        block = source.block(at)
        before = block[: next(n for n, one in enumerate(block) if one is at)]
        for one in reversed(before):
            if isinstance(one, ast.Assign) and _binds(one, name):
                return one
            if any(
                isinstance(n, ast.Name) and n.id == name and _is_store(n) for n in ast.walk(one)
            ):
                return None
        outer = source.parents[at]
        if not isinstance(outer, ast.stmt) or isinstance(outer, Function | ast.ClassDef):
            return None
        at = outer


def _binds(assign: ast.Assign, name: str) -> bool:
    (target, *others) = assign.targets
    return not others and isinstance(target, ast.Name) and target.id == name


def _is_store(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


def stays(source: Source, tensor: ast.expr, statement: ast.stmt) -> bool:
    """Whether the tensor is a new one, or has a name through which and through no other it is only read."""
    if is_fresh(tensor, source):
        return True
    if not isinstance(tensor, ast.Name) or not was_fresh(source, tensor.id, statement):
        return False
    function = source.function(statement)
    added = [isinstance(source.parents[one], ast.AugAssign) for one in stores(function, tensor.id)]
    return not any(added) and all(only_reads(source, use) for use in loads(function, tensor.id))
