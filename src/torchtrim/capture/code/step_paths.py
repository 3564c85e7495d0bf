"""Checks that an optimizer's `step` follows a backward on every path of the program.

It reads the source from the line that calls `backward`: the rest of its block, of the enclosing blocks and of
the calling functions, and of functions that these call. A `step` in a branch follows only if the other branch
has one too, or if the branch counts micro-batches (`if (i + 1) % 4 == 0`). It evaluates tests of settings
that do not change in the loop (`if args.clip`, `if scaler is None`). Unknown code counts as a path without a
step.
"""

from __future__ import annotations

import ast
import enum
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchtrim.capture.code.live import UNKNOWN, Resolved, Scope, function_of, is_trusted, node_of
from torchtrim.core.isolation import debugging, said_of
from torchtrim.dispatch.places import variables_of

_DEPTH = 8
"""Nested calls. Arbitrary: a `step` in deeper code is not found."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
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
    """The end of a path through some statements."""

    STEPS = "it steps"
    PASSES = "it reaches the end of the statements"
    RETURNS = "it returns"
    LEAVES = "it leaves the loop"
    TURNS = "it begins the next iteration"
    UNSURE = "it may end without a step"


class Follows(NamedTuple):
    """The verdict: True if a step follows for certain; else `why_not` names the line in question."""

    sure: bool
    why_not: str = ""


def step_follows(optimizer: torch.optim.Optimizer) -> Follows:
    """Return the verdict for the running backward. Call it inside that backward or one of its hooks."""
    frame = _calling_backward(sys._getframe(1))
    if frame is None:
        # On a device, hooks run in a thread of autograd.
        engines = [
            one
            for one in sys._current_frames().values()
            if one.f_code.co_name == "_engine_run_backward" and one.f_back is not None
        ]
        frame = _calling_backward(engines[0]) if len(engines) == 1 else None
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


class _Paths:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._why = ""
        self._parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._busy: set[types.CodeType] = set()

    def from_frame(self, start: types.FrameType) -> Follows:
        frame: types.FrameType | None = start
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] == "torch":
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
        node = node_of(frame.f_code)
        scope = None if node is None else Scope(node, frame.f_globals, now=variables_of(frame))
        positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
        line, _, column, _ = next(positions, (None, None, None, None))
        trail: Trail = []
        if scope is not None and line is not None and column is not None:
            trail = _trail(scope.node, (line, column))
        if scope is None or not trail:
            return self._unsure(f"{frame.f_code.co_filename}:{frame.f_lineno} cannot be read")
        leaving = False
        for body, index, parent in reversed(trail):
            if not leaving:
                after = body[index + 1 :]
                if isinstance(parent, ast.Try):
                    after += [*(parent.orelse if body is parent.body else ()), *parent.finalbody]
                way = self._through(after, scope)
                leaving = way in (Way.LEAVES, Way.TURNS)
                if not leaving and way is not Way.PASSES:
                    return way
            leaving = leaving and not isinstance(parent, _LOOPS)
        return Way.PASSES

    def _through(self, statements: Iterable[ast.stmt], scope: Scope) -> Way:
        for statement in statements:
            way = self._of(statement, scope)
            if way is not Way.PASSES:
                return way
        return Way.PASSES

    def _of(self, node: ast.stmt, scope: Scope) -> Way:
        headers = [getattr(node, name, None) for name in ("test", "iter", "subject")]
        expressions = [ast.Expr(one) for one in headers if isinstance(one, ast.expr)]
        for header in (*expressions, *getattr(node, "items", ())):
            if why := self._reads(header, scope):
                return self._unsure(why)
        if isinstance(node, ast.If):
            return self._branch(node, scope)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            return self._through(node.body, scope)
        if isinstance(node, ast.Try):
            return self._through([*node.body, *node.orelse, *node.finalbody], scope)
        if isinstance(node, _LOOPS):
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
        over = _elements(scope, node.iter) if isinstance(node, ast.For) else ()
        target = getattr(node, "target", None)
        if isinstance(target, ast.Name) and any(one is self._optimizer for one in over):
            bound = scope.bound(target.id, self._optimizer)
            if self._through(node.body, bound) is Way.STEPS:
                return Way.STEPS
        way = self._through(node.body, scope)
        passes = way in (Way.PASSES, Way.LEAVES, Way.TURNS)
        return Way.PASSES if passes else self._unsure(self._at(node))

    def _calls(self, node: ast.AST, scope: Scope) -> Way:
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
                # A disabled GradScaler always steps.
                disabled = not getattr(owner, "_enabled", True)
                return Way.STEPS if disabled else self._unsure(self._at(call))
        if name in _EXITS or (name == "backward" and not certain):
            return self._unsure(self._at(call))
        return self._inside(call, scope)

    def _reads(self, node: ast.AST, scope: Scope) -> str:
        """Describe the expression in a node that uses weights, or return an empty string."""
        read = next((one for one in _used(node) if self._reads_weights(one, scope)), None)
        if read is None:
            return ""
        return f"line {read.lineno} (`{ast.unparse(read)[:60]}`) uses weights before `step`"

    def _reads_weights(self, used: ast.expr, scope: Scope) -> bool:
        """Return True for a parameter of the optimizer, or a module that has one."""
        if isinstance(used, ast.Subscript):
            return isinstance(used.slice, ast.Constant) and used.slice.value == "params"
        owner = used
        while isinstance(owner, ast.Attribute):
            if id(scope.value(owner.value).value) in self._parameters:
                return owner.attr not in _WITHOUT_VALUES
            owner = owner.value
        value = scope.value(used).value
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.nn.Module):
            function: Any = value.__func__
            if not is_trusted(function) or function.__name__ in _LEAVES_WEIGHTS:
                return False
            value = value.__self__
        if isinstance(value, torch.nn.Module):
            return any(id(one) in self._parameters for one in value.parameters())
        return id(value) in self._parameters

    def _inside(self, call: ast.Call, scope: Scope) -> Way:
        resolved = function_of(scope.value(call.func).value)
        if resolved is None or is_trusted(resolved[0]) or len(self._busy) >= _DEPTH:
            return Way.PASSES
        function, bound = resolved
        inner = Scope.of(function)
        if inner is None or function.__code__ in self._busy:
            return Way.PASSES
        values = [*(Resolved(one, True) for one in bound), *map(scope.value, call.args)]
        inner.given.update(zip(inner.parameters, values, strict=False))
        keywords = ((one.arg, scope.value(one.value)) for one in call.keywords if one.arg)
        inner.given.update((name, value) for name, value in keywords if name in inner.given)
        self._busy.add(function.__code__)
        try:
            if isinstance(inner.node, ast.Lambda):
                way = self._calls(inner.node.body, inner)
            else:
                way = self._through(inner.node.body, inner)
        finally:
            self._busy.discard(function.__code__)
        return Way.PASSES if way is Way.RETURNS else way

    def _truth(self, test: ast.expr, scope: Scope) -> bool | None:
        """Evaluate a test of settings, or return None if it may change."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            known = self._truth(test.operand, scope)
            return None if known is None else not known
        if isinstance(test, ast.BoolOp):
            parts = [self._truth(one, scope) for one in test.values]
            decides = isinstance(test.op, ast.Or)
            return decides if decides in parts else None if None in parts else not decides
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
        if not isinstance(one, _SETTINGS) or not isinstance(other, _SETTINGS):
            return None
        equal = isinstance(operator, ast.Eq)
        return (one == other) == equal if equal or isinstance(operator, ast.NotEq) else None

    def _setting(self, expression: ast.expr, scope: Scope) -> Any:
        if isinstance(expression, ast.Constant):
            return expression.value
        if not isinstance(expression, (ast.Name, ast.Attribute)):
            return UNKNOWN
        targets = (
            ast.unparse(target)
            for loop in ast.walk(scope.node)
            if isinstance(loop, _LOOPS)
            for target in ast.walk(loop)
            if isinstance(target, (ast.Name, ast.Attribute)) and isinstance(target.ctx, ast.Store)
        )
        return UNKNOWN if ast.unparse(expression) in targets else scope.value(expression).value

    def _counts(self, test: ast.expr, scope: Scope) -> bool:
        """Return True if a test counts micro-batches: a remainder of integers."""
        tests = test.values if isinstance(test, ast.BoolOp) else [test]
        return (
            any(isinstance(one, ast.Mod) for one in ast.walk(test))
            and all(isinstance(one, (ast.Compare, ast.UnaryOp, ast.BinOp)) for one in tests)
            and all(_is_whole(one, scope) for one in ast.walk(test))
        )

    def _unsure(self, why: str) -> Way:
        self._why = self._why or why
        return Way.UNSURE

    def _at(self, node: Any) -> str:
        return f"line {node.lineno} (`{ast.unparse(node).splitlines()[0][:60]}`) may leave without a `step`"


def _is_whole(node: ast.AST, scope: Scope) -> bool:
    """Return False for a part of a test that is certainly not an integer."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _COUNTERS
    if isinstance(node, (ast.Name, ast.Attribute)):
        value = scope.value(node).value
        if isinstance(value, torch.Tensor):
            return False
        is_open = value is UNKNOWN or callable(value) or hasattr(value, "__len__")
        return is_open or isinstance(value, int)
    return True


Trail = list[tuple[list[ast.stmt], int, ast.AST]]


def _trail(node: ast.AST, place: tuple[int, int]) -> Trail:
    for body in _bodies(node):
        for index, statement in enumerate(body):
            first = statement.lineno, statement.col_offset
            last = statement.end_lineno or 0, statement.end_col_offset or 0
            if first <= place < last:
                return [(body, index, node), *_trail(statement, place)]
    return []


def _bodies(node: ast.AST) -> Iterator[list[Any]]:
    for name in ("body", "orelse", "finalbody"):
        if isinstance(body := getattr(node, name, None), list):
            yield body
    for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield inner.body


def _certain(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    always: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        always = ()
    elif isinstance(node, (ast.IfExp, ast.BoolOp)):
        always = [node.test if isinstance(node, ast.IfExp) else node.values[0]]
    for one in always:
        yield from _certain(one)


def _used(node: ast.AST) -> Iterator[Any]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Attribute, ast.Name, ast.Subscript)):
            yield child
        inner = child
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if inner is child or not isinstance(inner, ast.Name):
            yield from _used(inner)


def _elements(scope: Scope, expression: ast.expr) -> list[Any]:
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        owner = scope.value(expression.func.value).value
        is_values = expression.func.attr == "values" and isinstance(owner, dict)
        return list(owner.values()) if is_values else []
    if isinstance(expression, (ast.List, ast.Tuple)):
        return [scope.value(one).value for one in expression.elts]
    value = scope.value(expression).value
    return list(value) if isinstance(value, (list, tuple)) else []
