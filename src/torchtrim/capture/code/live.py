"""Resolves the names in the source of loaded functions to their current objects.

It runs no code of the program: attributes are looked up statically, properties are not called.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

_TRUSTED = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "torchtrim", "einops", "triton"}
_ON_REQUEST = ("transformers.model_debugging_utils",)
"""Code reached by every model of a library, which writes only on the user's request."""
UNKNOWN: Final = object()
"""A value that is known only once the program runs."""

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_TENSOR_VIEWS = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


class Resolved(NamedTuple):
    """The value of an expression. `outlives`: the object exists before and after the call."""

    value: Any
    outlives: bool


_LOCAL = Resolved(UNKNOWN, False)


@functools.lru_cache(maxsize=256)
def _nodes(
    path: str, lines: tuple[str, ...]
) -> tuple[ast.Module, dict[tuple[int, str], list[FunctionNode]]] | None:
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions: dict[tuple[int, str], list[FunctionNode]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            lines_of = (one.lineno for one in (node, *getattr(node, "decorator_list", ())))
            where = min(lines_of), getattr(node, "name", "<lambda>")
            functions.setdefault(where, []).append(node)
    return tree, functions


def node_of(code: types.CodeType) -> FunctionNode | ast.Module | None:
    """Return the syntax tree of a code object, or None without source."""
    parsed = _nodes(code.co_filename, tuple(linecache.getlines(code.co_filename)))
    if parsed is None:
        return None
    tree, functions = parsed
    if code.co_name == "<module>":
        return tree if tree.body else None
    nodes = functions.get((code.co_firstlineno, code.co_name), [])
    return nodes[0] if len(nodes) == 1 else _spanning(nodes, code)


def _spanning(nodes: Sequence[FunctionNode], code: types.CodeType) -> ast.Lambda | None:
    """Return the innermost of several lambdas of a line whose body all of the code is in, or None."""
    places = [(line, at) for line, _, at, _ in code.co_positions() if line is not None and at]
    around = [
        node
        for node in nodes
        if isinstance(node, ast.Lambda)
        and all(_begin(node.body) <= place < _end(node.body) for place in places)
    ]
    return max(around, key=lambda node: _begin(node.body), default=None)


def _begin(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def lookup(owner: Any, name: str) -> Any:
    """Return an attribute without running code: a value, a bound method, or `UNKNOWN`."""
    if isinstance(owner, torch.Tensor):
        return owner if name in _TENSOR_VIEWS else UNKNOWN
    if isinstance(owner, types.ModuleType):
        return vars(owner).get(name, UNKNOWN)
    if isinstance(owner, nn.Module):
        for table in (vars(owner), owner._parameters, owner._buffers, owner._modules):
            if name in table:
                return table[name]
    found = inspect.getattr_static(owner, name, UNKNOWN)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return types.MethodType(found.__func__, owner if isinstance(owner, type) else type(owner))
    if isinstance(found, types.FunctionType) and not isinstance(owner, type):
        return types.MethodType(found, owner)
    if isinstance(found, (property, types.GetSetDescriptorType, types.MemberDescriptorType)):
        return UNKNOWN
    return found


def is_trusted(thing: type | types.FunctionType) -> bool:
    """Return True for code of torch or of another library without own state."""
    if isinstance(thing, types.FunctionType):
        module = thing.__globals__.get("__name__", "")
    else:
        module = thing.__module__
    return str(module).partition(".")[0] in _TRUSTED or module in _ON_REQUEST


def function_of(value: Any) -> tuple[types.FunctionType, tuple[Any, ...]] | None:
    """Return the Python function that a call of `value` runs, and the arguments bound to it."""
    bound: tuple[Any, ...] = ()
    for _ in range(8):
        if isinstance(value, types.FunctionType):
            return value, bound
        if isinstance(value, types.MethodType):
            value, bound = value.__func__, (value.__self__, *bound)
        elif isinstance(value, functools.partial):
            value, bound = value.func, (*value.args, *bound)
        elif hasattr(type(value), "__wrapped__") or "__wrapped__" in getattr(value, "__dict__", {}):
            value = inspect.getattr_static(value, "__wrapped__", UNKNOWN)
        elif isinstance(inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
            value, bound = type(value).__call__, (value, *bound)
        else:
            return None
    return None


class Scope:
    """The resolved names of one function. `given` holds the values of parameters, by name.

    `seen` is called for each name and attribute looked up outside the function, with its table, name and
    value (`UNKNOWN` if missing). `now`: the local variables of a running call.
    """

    def __init__(
        self,
        node: FunctionNode | ast.Module,
        names: Mapping[str, Any],
        *,
        closure: Mapping[str, Any] | None = None,
        given: Mapping[str, Resolved] | None = None,
        seen: Callable[[Any, str, Any], None] = lambda *_: None,
        now: Mapping[str, Any] | None = None,
    ) -> None:
        self.node = node
        self._now = now or {}
        self.given = dict.fromkeys(_parameters(node), _LOCAL) | dict(given or {})
        self._names = names
        self._closure = closure or {}
        self._seen = seen
        self._assigned = _assignments(node)
        self._busy: set[str] = set()

    @staticmethod
    def of(
        function: types.FunctionType, seen: Callable[[Any, str, Any], None] = lambda *_: None
    ) -> Scope | None:
        """Return the scope of a function, or None without source."""
        node = node_of(function.__code__)
        if node is None or isinstance(node, ast.Module):
            return None
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        closure = {name: content(cell) for name, cell in cells}
        return Scope(node, function.__globals__, closure=closure, seen=seen)

    def bound(self, name: str, value: Any) -> Scope:
        """Return this scope with a name bound to a value."""
        now = {**self._now, name: value}
        return Scope(self.node, self._names, closure=self._closure, given=self.given, now=now)

    @property
    def parameters(self) -> list[str]:
        """Return the names of the positional parameters, in order."""
        args = getattr(self.node, "args", None)
        return [] if args is None else [one.arg for one in (*args.posonlyargs, *args.args)]

    @property
    def closes_over(self) -> frozenset[str]:
        """Return the names that the function declares `global` or `nonlocal`."""
        nodes = own_nodes(self.node)
        declared = (one for one in nodes if isinstance(one, (ast.Global, ast.Nonlocal)))
        names = {name for one in declared for name in one.names}
        return frozenset(names - self._assigned.keys())

    def is_local(self, name: str) -> bool:
        """Return True if the name is local to the function."""
        return name in self._assigned or name in self.given

    def value(self, expression: ast.expr) -> Resolved:
        """Return the value of an expression, and whether it outlives the call."""
        if isinstance(expression, ast.Name):
            return self._name(expression.id)
        if isinstance(expression, ast.Attribute):
            return self._attribute(expression)
        if isinstance(expression, ast.Subscript):
            return self._element(expression)
        if isinstance(expression, ast.Call):
            return self._result(expression)
        if isinstance(expression, ast.Constant):
            return Resolved(expression.value, False)
        if isinstance(expression, (ast.NamedExpr, ast.Starred)):
            return self.value(expression.value)
        if isinstance(expression, ast.IfExp):
            return _joined(map(self.value, (expression.body, expression.orelse)))
        if isinstance(expression, ast.BoolOp):
            return _joined(map(self.value, expression.values))
        return _LOCAL

    def _name(self, name: str) -> Resolved:
        if name in self._now:
            return Resolved(self._now[name], True)
        if name in self._assigned:
            return self._assigned_value(name)
        if name in self.given:
            return self.given[name]
        if name in self._closure:
            return Resolved(self._closure[name], True)
        found = self._names.get(name, UNKNOWN)
        self._seen(self._names, name, found)
        return Resolved(vars(builtins).get(name, UNKNOWN) if found is UNKNOWN else found, True)

    def _assigned_value(self, name: str) -> Resolved:
        """Return a local name's value if all assignments agree."""
        if name in self._busy:
            return _LOCAL
        self._busy.add(name)
        try:
            values = [
                self.value(source) if part == _WHOLE else self._part(source, part)
                for source, part in self._assigned[name]
            ]
        finally:
            self._busy.discard(name)
        return _joined([*values, self.given[name]] if name in self.given else values)

    def _part(self, source: ast.expr, part: int | None) -> Resolved:
        """Return the value of an expression's element; `part` is its index, None for any."""
        if isinstance(source, (ast.List, ast.Tuple)):
            every = list(map(self.value, source.elts))
            return every[part] if part is not None and part < len(every) else _joined(every)
        value, outlives = self.value(source)
        if part is not None and type(value) in (list, tuple) and part < len(value):
            return Resolved(value[part], outlives)
        return Resolved(UNKNOWN, outlives)

    def _attribute(self, expression: ast.Attribute) -> Resolved:
        owner = self.value(expression.value)
        if owner.value is UNKNOWN:
            return owner
        if expression.attr == "__class__":
            return self._class_of(expression.value)
        found = lookup(owner.value, expression.attr)
        if owner.outlives:
            self._seen(owner.value, expression.attr, found)
        return Resolved(found, owner.outlives)

    def _named_attribute(self, owner: ast.expr, name: ast.expr) -> Resolved:
        if not isinstance(name, ast.Constant):
            return _LOCAL
        return self._attribute(ast.Attribute(value=owner, attr=str(name.value), ctx=ast.Load()))

    def _class_of(self, expression: ast.expr) -> Resolved:
        owner = self.value(expression)
        return owner if owner.value is UNKNOWN else Resolved(type(owner.value), owner.outlives)

    def _element(self, expression: ast.Subscript) -> Resolved:
        owner = self.value(expression.value)
        if isinstance(owner.value, torch.Tensor):
            return owner
        index = self.value(expression.slice).value
        if type(owner.value) in (list, tuple, dict) and isinstance(index, (int, str)):
            try:
                found = owner.value[index]
            except (KeyError, IndexError, TypeError):
                found = UNKNOWN
            if owner.value is self._names:
                self._seen(self._names, str(index), found)
            return Resolved(found, owner.outlives)
        return Resolved(UNKNOWN, owner.outlives)

    def _result(self, call: ast.Call) -> Resolved:
        """Return a call's result: a view counts as its tensor; elements outlive if their container does."""
        if not isinstance(call.func, ast.Attribute):
            return self._built_in(call)
        owner = self.value(call.func.value)
        if isinstance(owner.value, torch.Tensor):
            return owner if call.func.attr in _VIEWS else _LOCAL
        elements = owner.outlives and isinstance(owner.value, (list, tuple, dict, set))
        return Resolved(UNKNOWN, elements)

    def _built_in(self, call: ast.Call) -> Resolved:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in ("getattr", "hasattr") and len(call.args) >= 2:
            found = self._named_attribute(*call.args[:2])
            return found if name == "getattr" else _LOCAL
        if name == "globals":
            return Resolved(self._names, True)
        if name == "type" and len(call.args) == 1:
            return self._class_of(call.args[0])
        if name in ("enumerate", "zip", "reversed", "iter", "next"):
            return _joined(map(self.value, call.args))._replace(value=UNKNOWN)
        return _LOCAL


_VIEW_NAMES = """
    detach view view_as reshape flatten unflatten squeeze unsqueeze transpose t permute select narrow diagonal
    expand expand_as contiguous requires_grad_ chunk split unbind numpy
"""
_VIEWS = frozenset(_VIEW_NAMES.split())


def content(cell: types.CellType) -> Any:
    """Return a closure cell's content, `UNKNOWN` for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNKNOWN


def is_generator(value: Any) -> bool:
    """Return True for a random generator of torch, Python or numpy."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(
        value, (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    )


def _joined(values: Iterable[Resolved]) -> Resolved:
    every = list(values)
    if not every:
        return _LOCAL
    same = all(one.value is every[0].value for one in every)
    return Resolved(every[0].value if same else UNKNOWN, any(one.outlives for one in every))


AssignedParts = dict[str, list[tuple[ast.expr, int | None]]]
_WHOLE = -1


@functools.lru_cache(maxsize=4096)
def _assignments(node: Any) -> AssignedParts:
    """Return the expressions assigned to each name of a function, with the index of the assigned element:
    `_WHOLE`, or None if unknown."""
    assigned: AssignedParts = {}
    if isinstance(node, ast.Module):
        return assigned
    outer = {name for one in own_nodes(node) if isinstance(one, ast.Global) for name in one.names}
    for one in own_nodes(node):
        for name in _bare_names(one):
            assigned.setdefault(name, [])
        for target, source, whole in _targets(one):
            for name, part in _names(target, whole=whole):
                assigned.setdefault(name, []).append((source, part))
    return {name: sources for name, sources in assigned.items() if name not in outer}


def _names(target: ast.expr, *, whole: bool) -> Iterator[tuple[str, int | None]]:
    elements = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    is_known = whole and not any(isinstance(one, ast.Starred) for one in elements)
    places = {id(one): index for index, one in enumerate(elements)} if is_known else {}
    for inner in ast.walk(target):
        if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            yield inner.id, _WHOLE if whole and inner is target else places.get(id(inner))


def _targets(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value, True
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value, True
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.target, node.iter, False
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr, True


def _bare_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _FUNCTIONS):
        yield from _parameters(node)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((one.asname or one.name).partition(".")[0] for one in node.names)
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name


def _parameters(node: Any) -> Iterator[str]:
    args = getattr(node, "args", None)
    if isinstance(args, ast.arguments):
        every = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
        yield from (one.arg for one in every if one is not None)


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a function's body, including nested functions, without its decorators and defaults."""
    body: Any = getattr(node, "body", [])
    for one in body if isinstance(body, list) else [body]:
        yield from ast.walk(one)
