"""Tells if an optimizer's `step` follows a backward on every path of the program.

It reads the source from the line that calls `backward`: the rest of its block, of the enclosing blocks and of
the calling functions, and into functions that these call. A `step` in a branch follows only if the other
branch has one too, or if the branch counts micro-batches (`if (i + 1) % 4 == 0`). Tests of settings that do
not change in the loop (`if args.clip`, `if scaler is None`) are evaluated. Unknown code counts as a path
without a step.
"""

from __future__ import annotations

import ast
import enum
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch

from torchtrim.capture.code.live import UNKNOWN, Scope, Value, function_of
from torchtrim.capture.code.side_effects import is_trusted
from torchtrim.core.isolation import debugging, said_of

_DEPTH = 8
"""Arbitrary: nested calls that are followed; a `step` below is not found."""

_COUNTERS = ("len", "int", "min", "max")
_LEAVES_WEIGHTS = ("train", "eval", "zero_grad", "requires_grad_", "no_sync")
_OF_NO_VALUES = """
    grad requires_grad requires_grad_ shape size ndim dim numel device dtype is_leaf register_hook
    register_post_accumulate_grad_hook
"""
_WITHOUT_VALUES = frozenset(_OF_NO_VALUES.split())
_SETTINGS = (bool, int, float, str, type(None))
_EXITS = ("exit", "_exit", "quit", "abort")
_PASSED_THROUGH = ("decorate_context", "wrapper", "inner", "_fn")


class Way(enum.Enum):
    """Where a path through some statements leads."""

    STEPS = "it steps"
    PASSES = "it comes to the end"
    RETURNS = "it returns"
    LEAVES = "it leaves the loop"
    TURNS = "it goes to the next turn of the loop"
    UNSURE = "it may end without a step"


class Follows(NamedTuple):
    """The verdict: True if a step follows for certain; else `why_not` names the line in question."""

    sure: bool
    why_not: str = ""


def step_follows(optimizer: torch.optim.Optimizer) -> Follows:
    """Return the verdict for the running backward. Call it inside that backward or one of its hooks."""
    frame = _calling_backward(sys._getframe(1)) or _of_other_thread()
    if frame is None:
        return Follows(False, "the call of backward was not found")
    try:
        return _Paths(optimizer).from_frame(frame)
    except Exception as error:
        if debugging():
            raise
        return Follows(False, f"the code after backward cannot be read ({said_of(error)})")


def _calling_backward(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the frame that called `backward`; wrappers of torchtrim may be in between."""
    caller = None
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name in ("torch.autograd", "torch.autograd.graph", "torch._tensor"):
            caller = frame.f_back
        elif name.partition(".")[0] not in ("torch", "torchtrim"):
            break
        frame = frame.f_back
    return caller


def _of_other_thread() -> types.FrameType | None:
    """Find the caller in another thread: on a device, hooks run in a thread of autograd."""
    frames = sys._current_frames().values()
    found = [
        one
        for one in frames
        if one.f_code.co_name == "_engine_run_backward" and one.f_back is not None
    ]
    return _calling_backward(found[0]) if len(found) == 1 else None


class _Paths:
    """A reader of paths for one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._why = ""
        self._parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._busy: set[types.CodeType] = set()

    def from_frame(self, start: types.FrameType) -> Follows:
        """Read from a frame's current position."""
        frame: types.FrameType | None = start
        while frame is not None:
            if _is_library(frame):
                if frame.f_code.co_name not in _PASSED_THROUGH:
                    return Follows(False, f"`{frame.f_code.co_name}` of a library calls backward")
            else:
                way = self._rest_of(frame)
                if way is Way.STEPS:
                    return Follows(True)
                if way is Way.UNSURE:
                    return Follows(False, self._why)
            frame = frame.f_back if frame.f_code.co_name != "<module>" else None
        return Follows(False, "no `step` comes after it")

    def _rest_of(self, frame: types.FrameType) -> Way:
        """Return the path from a frame's current statement to the end of its function."""
        scope = Scope.of_frame(frame)
        place = _position(frame)
        trail = None if scope is None or place is None else _trail(scope.node, place)
        if scope is None or not trail:
            return self._unsure(f"{frame.f_code.co_filename}:{frame.f_lineno} cannot be read")
        leaving = False
        for body, index, parent in reversed(trail):
            if not leaving:
                way = self._through([*body[index + 1 :], *_after(parent, body)], scope)
                leaving = way in (Way.LEAVES, Way.TURNS)
                if not leaving and way is not Way.PASSES:
                    return way
            leaving = leaving and not _is_loop(parent)
        return Way.PASSES

    def _through(self, statements: Iterable[ast.stmt], scope: Scope) -> Way:
        """Return the path through a list of statements."""
        for statement in statements:
            way = self._of(statement, scope)
            if way is not Way.PASSES:
                return way
        return Way.PASSES

    def _of(self, node: ast.stmt, scope: Scope) -> Way:
        if why := next((why for one in _headers(node) if (why := self._reads(one, scope))), ""):
            return self._unsure(why)
        if isinstance(node, ast.If):
            return self._branch(node, scope)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._through(node.body, scope)
        if isinstance(node, ast.Try):
            return self._through([*node.body, *node.orelse, *node.finalbody], scope)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            return self._loop(node, scope)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return Way.PASSES
        if isinstance(node, (ast.Raise, ast.Assert, ast.Match)):
            return self._unsure(self._at(node))
        way = self._calls(node, scope)
        if way is not Way.PASSES:
            return way
        ends = {ast.Return: Way.RETURNS, ast.Break: Way.LEAVES, ast.Continue: Way.TURNS}
        return ends.get(type(node), Way.PASSES)

    def _branch(self, node: ast.If, scope: Scope) -> Way:
        known = self._truth(node.test, scope)
        if known is not None:
            return self._through(node.body if known else node.orelse, scope)
        before = self._why
        one, other = self._through(node.body, scope), self._through(node.orelse, scope)
        if one is other:
            return one
        if self._counts(node.test, scope) and Way.UNSURE not in (one, other):
            self._why = before
            return Way.STEPS if Way.STEPS in (one, other) else Way.PASSES
        return self._unsure(self._at(node))

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, scope: Scope) -> Way:
        """Return the path through a loop: one over optimizers steps each, any other may not run at all."""
        if self._is_over_it(node, scope):
            bound = scope.bound(ast.unparse(node.target), self._optimizer)
            if self._through(node.body, bound) is Way.STEPS:
                return Way.STEPS
        way = self._through(node.body, scope)
        passes = way in (Way.PASSES, Way.LEAVES, Way.TURNS)
        return Way.PASSES if passes else self._unsure(self._at(node))

    def _is_over_it(self, node: ast.stmt, scope: Scope) -> TypeGuard[ast.For]:
        """Return True for a loop over optimizers that include this one."""
        if not isinstance(node, ast.For) or not isinstance(node.target, ast.Name):
            return False
        return any(one is self._optimizer for one in _elements(scope, node.iter))

    def _calls(self, node: ast.AST, scope: Scope) -> Way:
        """Return the path through the calls of a simple statement."""
        if why := self._reads(node, scope):
            return self._unsure(why)
        certain = set(map(id, _certain(node)))
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            way = self._call(call, scope, certain=id(call) in certain)
            if way is not Way.PASSES:
                return way if id(call) in certain else self._unsure(self._at(node))
        if any(isinstance(one, (ast.Yield, ast.YieldFrom, ast.Await)) for one in ast.walk(node)):
            return self._unsure(self._at(node))
        return Way.PASSES

    def _call(self, call: ast.Call, scope: Scope, *, certain: bool) -> Way:
        func = call.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if name == "step" and isinstance(func, ast.Attribute):
            owner = scope.value(func.value).value
            if owner is self._optimizer:
                return Way.STEPS
            if owner is UNKNOWN:
                return self._unsure(self._at(call))
            if any(scope.value(one).value is self._optimizer for one in call.args):
                return (
                    Way.STEPS
                    if not getattr(owner, "_enabled", True)
                    else self._unsure(self._at(call))
                )
        if name in _EXITS or (name == "backward" and not certain):
            return self._unsure(self._at(call))
        return self._inside(call, scope)

    def _reads(self, node: ast.AST, scope: Scope) -> str:
        """Describe the expression in a node that uses weights, or return an empty string."""
        read = next((one for one in _used(node) if self._reads_weights(one, scope)), None)
        if read is None:
            return ""
        return f"line {read.lineno} (`{ast.unparse(read)[:60]}`) uses weights before `step`"

    def _is_stepped(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and id(value) in self._parameters

    def _reads_weights(self, used: ast.expr, scope: Scope) -> bool:
        """Return True for a parameter of the optimizer, or a module that has one."""
        if isinstance(used, ast.Subscript):
            return isinstance(used.slice, ast.Constant) and used.slice.value == "params"
        for owner in _owners(used):
            if self._is_stepped(scope.value(owner.value).value):
                return owner.attr not in _WITHOUT_VALUES
        value = scope.value(used).value
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
            function: Any = value.__func__
            own = not is_trusted(function) or function.__name__ in _LEAVES_WEIGHTS
            return not own and self._reads_weights_of(value.__self__)
        if isinstance(value, torch.nn.Module):
            return self._reads_weights_of(value)
        return self._is_stepped(value)

    def _reads_weights_of(self, module: torch.nn.Module) -> bool:
        return any(id(one) in self._parameters for one in module.parameters())

    def _inside(self, call: ast.Call, scope: Scope) -> Way:
        """Return the path through a called function of the program."""
        found = function_of(scope.value(call.func).value)
        if found is None or is_trusted(found[0]) or len(self._busy) >= _DEPTH:
            return Way.PASSES
        function, bound = found
        if function.__code__ in self._busy:
            return Way.PASSES
        inner = Scope.of(function, {})
        if inner is None:
            return Way.PASSES
        values = [*(Value(one, True) for one in bound), *map(scope.value, call.args)]
        inner.given.update(zip(inner.parameters, values, strict=False))
        keywords = ((one.arg, scope.value(one.value)) for one in call.keywords if one.arg)
        inner.given.update((name, value) for name, value in keywords if name in inner.given)
        self._busy.add(function.__code__)
        try:
            way = (
                self._through(getattr(inner.node, "body", []), inner)
                if not isinstance(inner.node, ast.Lambda)
                else self._calls(inner.node.body, inner)
            )
        finally:
            self._busy.discard(function.__code__)
        return Way.PASSES if way is Way.RETURNS else way

    def _truth(self, test: ast.expr, scope: Scope) -> bool | None:
        """Evaluate a test of settings; None if it may change."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            known = self._truth(test.operand, scope)
            return None if known is None else not known
        if isinstance(test, ast.BoolOp):
            return _combined(test.op, [self._truth(one, scope) for one in test.values])
        if isinstance(test, ast.Compare):
            return self._compared(test, scope)
        value = self._setting(test, scope)
        return bool(value) if isinstance(value, _SETTINGS) else None

    def _compared(self, test: ast.Compare, scope: Scope) -> bool | None:
        if len(test.ops) != 1:
            return None
        one, other = (self._setting(side, scope) for side in (test.left, test.comparators[0]))
        if one is UNKNOWN or other is UNKNOWN:
            return None
        operator = test.ops[0]
        if isinstance(operator, (ast.Is, ast.IsNot)) and other is None:
            return (one is None) == isinstance(operator, ast.Is)
        if (
            isinstance(operator, (ast.Eq, ast.NotEq))
            and isinstance(one, _SETTINGS)
            and isinstance(other, _SETTINGS)
        ):
            return (one == other) == isinstance(operator, ast.Eq)
        return None

    def _setting(self, expression: ast.expr, scope: Scope) -> Any:
        """Return the value of a constant, or of a name or attribute that no loop assigns."""
        if isinstance(expression, ast.Constant):
            return expression.value
        if not isinstance(expression, (ast.Name, ast.Attribute)):
            return UNKNOWN
        if ast.unparse(expression) in _assigned_in_loops(scope.node):
            return UNKNOWN
        return scope.value(expression).value

    def _counts(self, test: ast.expr, scope: Scope) -> bool:
        """Return True if a test counts micro-batches: a remainder of integers."""
        remainder = any(
            isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) for one in ast.walk(test)
        )
        tests = test.values if isinstance(test, ast.BoolOp) else [test]
        if not remainder or not all(
            isinstance(one, (ast.Compare, ast.UnaryOp, ast.BinOp)) for one in tests
        ):
            return False
        return all(_is_whole(one, scope) for one in ast.walk(test))

    def _unsure(self, why: str) -> Way:
        self._why = self._why or why
        return Way.UNSURE

    def _at(self, node: Any) -> str:
        return f"line {node.lineno} (`{ast.unparse(node).splitlines()[0][:60]}`) may leave without a `step`"


def _is_library(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


def _is_whole(node: ast.AST, scope: Scope) -> bool:
    """Return True unless a part of a test is known not to be an integer."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _COUNTERS
    if isinstance(node, (ast.Name, ast.Attribute)):
        value = scope.value(node).value
        known = (
            value is UNKNOWN
            or isinstance(value, int)
            or callable(value)
            or hasattr(value, "__len__")
        )
        return known and not isinstance(value, torch.Tensor)
    return True


def _combined(operator: ast.boolop, known: list[bool | None]) -> bool | None:
    decides = isinstance(operator, ast.Or)
    if decides in known:
        return decides
    return None if None in known else not decides


def _position(frame: types.FrameType) -> tuple[int, int] | None:
    """Return the line and column of a frame's current instruction."""
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, _, column, _ = next(positions, (None, None, None, None))
    return (line, column) if line is not None and column is not None else None


Trail = list[tuple[list[ast.stmt], int, ast.AST]]


def _trail(node: ast.AST, place: tuple[int, int]) -> Trail:
    """Return the statements around a position, outermost first, as body, index and the body's owner."""
    for body in _bodies(node):
        for index, statement in enumerate(body):
            first = statement.lineno, statement.col_offset
            last = statement.end_lineno or 0, statement.end_col_offset or 0
            if first <= place < last:
                return [(body, index, node), *_trail(statement, place)]
    return []


def _bodies(node: ast.AST) -> Iterator[list[Any]]:
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list):
            yield body
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for case in getattr(node, "cases", ()):
        yield case.body


def _after(parent: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements a `try` runs after one of its bodies without an exception."""
    if not isinstance(parent, ast.Try):
        return []
    return [*(parent.orelse if body is parent.body else []), *parent.finalbody]


def _headers(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions a compound statement evaluates before its body."""
    for name in ("test", "iter", "subject"):
        if isinstance(one := getattr(node, name, None), ast.expr):
            yield ast.Expr(one)
    yield from getattr(node, "items", ())


def _owners(used: ast.expr) -> Iterator[ast.Attribute]:
    """Yield an attribute and its owners, innermost last."""
    while isinstance(used, ast.Attribute):
        yield used
        used = used.value


def _is_loop(node: ast.AST) -> bool:
    return isinstance(node, (ast.For, ast.AsyncFor, ast.While))


def _certain(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that always run."""
    yield node
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    if isinstance(node, ast.IfExp):
        yield from _certain(node.test)
    elif isinstance(node, ast.BoolOp):
        yield from _certain(node.values[0])
    else:
        for one in ast.iter_child_nodes(node):
            yield from _certain(one)


def _used(node: ast.AST) -> Iterator[Any]:
    """Yield the names, attributes and elements that a statement uses, without their owners."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute):
            inner: ast.expr = child
            while isinstance(inner, ast.Attribute):
                inner = inner.value
            yield child
            yield from _used(inner) if not isinstance(inner, ast.Name) else ()
        elif isinstance(child, (ast.Name, ast.Subscript)):
            yield child
            yield from _used(child)
        else:
            yield from _used(child)


def _elements(scope: Scope, expression: ast.expr) -> list[Any]:
    """Return the known elements of an iterated expression."""
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        owner = scope.value(expression.func.value).value
        return (
            list(owner.values())
            if expression.func.attr == "values" and isinstance(owner, dict)
            else []
        )
    if isinstance(expression, (ast.List, ast.Tuple)):
        return [scope.value(one).value for one in expression.elts]
    value = scope.value(expression).value
    return list(value) if isinstance(value, (list, tuple)) else []


def _assigned_in_loops(node: ast.AST) -> frozenset[str]:
    """Return the names and attributes assigned in a function's loops."""
    return frozenset(
        ast.unparse(target)
        for loop in ast.walk(node)
        if _is_loop(loop)
        for target in ast.walk(loop)
        if isinstance(target, (ast.Name, ast.Attribute)) and isinstance(target.ctx, ast.Store)
    )
