"""Uses of a name in user code, and who else may read or write its value."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Sequence

from torchtrim.source.nodes import (
    find_all,
    function_of,
    is_stored,
    keywords_of,
    method_of,
    name_set,
    names_in,
)
from torchtrim.source.operations import VALUES, VIEWS, is_fresh, is_pure
from torchtrim.source.source import Function, SourceFile

_Places = tuple[list[ast.Name], list[ast.Name]]
_KNOWN: weakref.WeakKeyDictionary[ast.AST, dict[str, _Places]] = weakref.WeakKeyDictionary()


def loads(function: ast.AST, name: str) -> Sequence[ast.Name]:
    """Return each read of a name in a function, including nested functions."""
    return _places(function, name)[0]


def stores(function: ast.AST, name: str) -> Sequence[ast.Name]:
    """Return each binding or deletion of a name in a function."""
    return _places(function, name)[1]


def binds(inside: ast.AST, expression: ast.expr) -> bool:
    """Return True if the code binds or deletes a name of the expression."""
    return any(stores(inside, name) for name in names_in(expression))


def assigned_name(statement: ast.stmt) -> str | None:
    """Return the name that a statement assigns, or None unless it assigns a single name."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def parameters(function: ast.AST) -> set[str]:
    """Return the names of a function's parameters; a module has none."""
    given = find_all(function.args, ast.arg) if isinstance(function, Function) else ()
    return {argument.arg for argument in given}


def _places(function: ast.AST, name: str) -> _Places:
    """Return the reads and bindings of a name; one walk of the function, since trees never change."""
    if (known := _KNOWN.get(function)) is None:
        known = _KNOWN[function] = {}
        for node in find_all(function, ast.Name):
            known.setdefault(node.id, ([], []))[is_stored(node)].append(node)
    return known.get(name, ([], []))


EVERYTHING: frozenset[str] = frozenset(["*"])
_WHOLE = name_set("locals globals vars eval exec dir")
_READERS = name_set("abs bool float int isinstance len max min print range round str sum")
_KEEPING = name_set("as_tensor asarray from_numpy save tensor_split")


def is_private(source: SourceFile, function: ast.AST, name: str) -> bool:
    """Return True if only the function itself uses the name: no inner function, `global` or `locals()`."""
    if (function, name) not in source.private:
        if function not in source.private_but:
            source.private_but[function] = _seen_elsewhere(function)
        declared = source.private_but[function]
        uses = (*loads(function, name), *stores(function, name))
        source.private[function, name] = (
            declared is not EVERYTHING
            and name not in declared
            and all(_is_own(source, function, node) for node in uses)
        )
    return source.private[function, name]


def _seen_elsewhere(function: ast.AST) -> frozenset[str]:
    """Return the names declared global or nonlocal, or `EVERYTHING` if the code looks at all its names."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        if function_of(node) in _WHOLE:
            return EVERYTHING
    return frozenset(found)


def only_reads(source: SourceFile, use: ast.Name) -> bool:
    """Return True if this use of a name neither writes to its value nor keeps a reference to it."""
    outer = source.parents[use]
    if isinstance(outer, ast.Subscript) and outer.value is use:
        return isinstance(outer.ctx, ast.Load) and only_reads_at(source, outer)
    return only_reads_at(source, use)


def only_reads_at(source: SourceFile, node: ast.AST) -> bool:
    """Return True if the code around a value only reads it."""
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


def is_fresh_name(source: SourceFile, name: str, statement: ast.stmt) -> bool:
    """Return True if an assignment before the statement created the tensor and later code only reads it."""
    function = source.function(statement)
    if not isinstance(function, Function) or not is_private(source, function, name):
        return False
    assign = assignment_before(source, name, statement)
    if assign is None or not is_fresh(assign.value, source):
        return False
    loop = source.loop(statement)
    if loop is not None and source.loop(assign) is not loop:
        return False
    since = range(assign.lineno + 1, statement.lineno)
    return not any(store.lineno in since for store in stores(function, name)) and all(
        only_reads(source, use) for use in loads(function, name) if use.lineno in since
    )


def literal_stores(source: SourceFile, function: ast.AST, name: str) -> list[ast.Constant] | None:
    """Return the numbers assigned to a name, or None if it gets any other value except by `+=`."""
    found = []
    for node in stores(function, name):
        if isinstance(source.parents[node], ast.AugAssign):
            continue
        value = assigned_to(source, node)
        if not isinstance(value, ast.Constant) or type(value.value) not in (int, float):
            return None
        found.append(value)
    return found


def assigned_to(source: SourceFile, target: ast.Name) -> ast.expr | None:
    """Return the value assigned to a name, also in `a = b = 0` and `a, b = 0, 1`."""
    outer = source.parents[target]
    if isinstance(outer, ast.Assign | ast.AnnAssign):
        return outer.value
    if isinstance(outer, ast.Tuple) and isinstance(assign := source.parents[outer], ast.Assign):
        value = assign.value
        if isinstance(value, ast.Tuple) and len(value.elts) == len(outer.elts):
            return value.elts[outer.elts.index(target)]
    return None


def _is_own(source: SourceFile, function: ast.AST, node: ast.Name) -> bool:
    """Return True if a name is used in the function itself, or is an inner function's own variable."""
    inner = source.function(node)
    if inner is function:
        return True
    while inner is not function and not isinstance(inner, ast.Module):
        if node.id in source.bound(inner):
            return True
        inner = source.function(inner)
    return False


def _reading_call(source: SourceFile, call: ast.Call) -> bool:
    if (dotted := source.dotted(call.func)) is not None:
        reads = dotted.startswith(("math.", "numpy.", "statistics."))
        reads |= dotted.startswith("torch.") and is_fresh(call, source)
        return reads and dotted.rpartition(".")[2] not in _KEEPING
    if isinstance(call.func, ast.Attribute):
        return is_fresh(call, source)
    return function_of(call) in _READERS


def assignment_before(source: SourceFile, name: str, statement: ast.stmt) -> ast.Assign | None:
    """Return the last assignment to the name alone that certainly ran before the statement."""
    at: ast.stmt = statement
    while True:
        block = source.block(at)
        for one in reversed(block[: block.index(at)]):
            if isinstance(one, ast.Assign) and assigned_name(one) == name:
                return one
            if stores(one, name):
                return None
        outer = source.parents[at]
        if not isinstance(outer, ast.stmt) or isinstance(outer, Function | ast.ClassDef):
            return None
        at = outer


def lifetime(source: SourceFile, statement: ast.stmt, name: str) -> ast.AST:
    """Return the code where a name keeps the value that a statement changes: from an assignment to the
    next in the same block, or else the whole function."""
    at: ast.AST = statement
    while isinstance(at, ast.stmt) and not isinstance(at, Function | ast.ClassDef):
        block = source.block(at)
        here = block.index(at)
        later = (one for one in block[here + 1 :] if assigned_name(one) == name)
        before = [one for one in block[:here] if assigned_name(one) == name]
        if before and isinstance(last := next(later, None), ast.Assign):
            first = block.index(before[-1])
            kept = [*block[first : block.index(last)], ast.Expr(last.value)]
            part = ast.If(test=ast.Constant(value=True), body=kept, orelse=[])
            return part if _stays(source, part) else source.function(statement)
        at = source.parents[at]
    return source.function(statement)


def _stays(source: SourceFile, part: ast.AST) -> bool:
    """Return True if no `break` or `continue` leaves the code."""
    inside = set(ast.walk(part))
    jumps = (node for node in inside if isinstance(node, ast.Break | ast.Continue))
    return all(source.loop(jump) in inside for jump in jumps)


def is_unshared(source: SourceFile, tensor: ast.expr, statement: ast.stmt) -> bool:
    """Return True if the tensor is fresh, or is read-only and has a single alias."""
    if is_fresh(tensor, source):
        return True
    if not isinstance(tensor, ast.Name) or not is_fresh_name(source, tensor.id, statement):
        return False
    function = source.function(statement)
    return not any(
        isinstance(source.parents[store], ast.AugAssign) for store in stores(function, tensor.id)
    ) and all(only_reads(source, use) for use in loads(function, tensor.id))


_HARMLESS_METHODS = name_set("""
    append extend insert items keys values get join format split strip startswith endswith lower
    upper replace count index
""")
_HARMLESS = name_set("print sorted repr id type slice iter")


def changes_nothing(source: SourceFile, inside: ast.AST) -> bool:
    """Return True if the code, by its form, writes to no tensor: known functions, no in-place assignment."""
    return all(_is_harmless(source, node) for node in ast.walk(inside))


def _is_harmless(source: SourceFile, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        written = keywords_of(node).keys() & {"out", "inplace", None}
        harmless = method_of(node) in _HARMLESS_METHODS or function_of(node) in _HARMLESS
        pure = is_pure(ast.Call(node.func, [], []), source)
        return (harmless and not written) or (pure and not written - {None})
    if isinstance(node, ast.Attribute | ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign):
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        return bool(name and literal_stores(source, source.function(node), name))
    return not isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.With | ast.AsyncFor)
