"""Names, functions and classes known while a file is walked, and the conditions that narrow them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torchtrim.linter.kinds import ARRAY, PLAIN, UNKNOWN, ValueKind, joined, tensor
from torchtrim.source.nodes import called, name_set

_NEVER = name_set("""
    is_scripting is_tracing is_compiling is_dynamo_compiling is_torchdynamo_compiling is_exporting
    is_torch_fx_proxy is_fx_tracing is_in_onnx_export is_onnx_exporting is_tracing_or_scripting
    is_torchdynamo_exporting is_jit_tracing is_torch_xla_available is_tensor_or_proxy_tracing
""")
_DEVICES = ("cuda", "xpu", "gpu", "npu")
_PLAIN_TYPES = name_set("int float bool str list tuple dict bytes set Number Integral Real")
_IS_TENSOR = ("is_tensor", "is_torch_tensor")
_SELDOM = 10  # arbitrary: code that runs at most every so many steps costs little
_COUNTER = re.compile(r"(\w*_)?(step|iter|iteration|iter_num|epoch)")
_PERIOD = re.compile(r"log|print|freq|interval|every|display|report|period", re.IGNORECASE)
Names = tuple[tuple[str, ValueKind], ...]


class Guard(NamedTuple):
    """Facts that a condition implies: True if its branch runs rarely, or never on a device (when true, when
    false), and the kinds of names in each branch."""

    true: bool = False
    false: bool = False
    when_true: Names = ()
    when_false: Names = ()


NONE = Guard()


def guard(test: ast.expr) -> Guard:
    """Return the facts that a condition implies."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = guard(test.operand)
        return Guard(inner.false, inner.true, inner.when_false, inner.when_true)
    if isinstance(test, ast.BoolOp):
        return _several(test)
    if isinstance(test, ast.Call):
        return _call(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(test.left, test.ops[0], test.comparators[0])
    if _is_remainder(test):
        return Guard(false=True)
    name = called(test)
    if name == "TYPE_CHECKING" or name in _NEVER:
        return Guard(true=True)
    if name in ("is_cuda", "is_cpu", "is_meta"):
        return Guard(true=name != "is_cuda", false=name == "is_cuda")
    return NONE


def _several(test: ast.BoolOp) -> Guard:
    parts = [guard(value) for value in test.values]
    if isinstance(test.op, ast.And):
        return Guard(
            true=any(part.true for part in parts),
            false=all(part.false for part in parts),
            when_true=tuple(one for part in parts for one in part.when_true),
        )
    return Guard(
        true=all(part.true for part in parts),
        false=any(part.false for part in parts),
        when_false=tuple(one for part in parts for one in part.when_false),
    )


def _call(test: ast.Call) -> Guard:
    name = called(test.func)
    if name in _NEVER:
        return Guard(true=True)
    if name == "is_available" and called(getattr(test.func, "value", test)) in _DEVICES:
        return Guard(false=True)
    if name in _IS_TENSOR and len(test.args) == 1 and isinstance(test.args[0], ast.Name):
        name_of = test.args[0].id
        return Guard(when_true=((name_of, tensor()),), when_false=((name_of, PLAIN),))
    if name == "isinstance" and len(test.args) == 2 and isinstance(test.args[0], ast.Name):
        return _instance(test.args[0].id, test.args[1])
    return NONE


def _instance(name: str, types: ast.expr) -> Guard:
    members = types.elts if isinstance(types, ast.Tuple) else [types]
    if isinstance(types, ast.BinOp):
        members = [types.left, types.right]
    lasts = {called(one) for one in members}
    if lasts <= {"Tensor", "LongTensor", "FloatTensor", "BoolTensor", "Parameter"}:
        return Guard(when_true=((name, tensor()),), when_false=((name, PLAIN),))
    if lasts <= {"ndarray", "generic"}:
        return Guard(when_true=((name, ARRAY),))
    return Guard(when_true=((name, PLAIN),)) if lasts <= _PLAIN_TYPES else NONE


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Guard:
    """Handle `x.device.type == "cpu"`, `device != torch.device("cuda")` and `step % 100 == 0`."""
    if not isinstance(operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
        return NONE
    counted = isinstance(right, ast.Constant) and _COUNTER.fullmatch(called(left)) is not None
    if isinstance(operator, ast.Eq | ast.NotEq) and (counted or _is_remainder(left)):
        is_equal = isinstance(operator, ast.Eq)
        return Guard(true=is_equal, false=not is_equal)
    named = called(left) in ("type", "device", "device_type") or "device" in called(left)
    values = _texts(right)
    if not named or not values:
        return NONE
    devices = {value.partition(":")[0] in _DEVICES for value in values}
    if len(devices) != 1:
        return NONE
    on_device = devices.pop()
    equal = isinstance(operator, ast.Eq | ast.In)
    return Guard(true=on_device != equal, false=on_device == equal)


def _is_remainder(node: ast.expr) -> bool:
    """Return True for `step % 100` and `i % log_interval`: of a large number, or by name of steps."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return False
    if isinstance(node.right, ast.Constant):
        return isinstance(node.right.value, int) and node.right.value >= _SELDOM
    counts = any(_COUNTER.fullmatch(called(part)) for part in ast.walk(node.left))
    return counts or _PERIOD.search(called(node.right)) is not None


def filled_cache(node: ast.If) -> str:
    """Return what `if self.x is None: self.x = ...` and `if k not in cache: cache[k] = ...` fill, or `""`."""
    test = node.test
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Is | ast.NotIn):
        return ""
    left, right = test.left, test.comparators[0]
    missing = isinstance(test.ops[0], ast.NotIn)
    looked_up = right if missing else left.value if isinstance(left, ast.NamedExpr) else left
    if isinstance(looked_up, ast.Call) and called(looked_up.func) == "get":
        looked_up, missing = getattr(looked_up.func, "value", looked_up), True
    kept = ast.unparse(looked_up)
    stored = (target for one in node.body if isinstance(one, ast.Assign) for target in one.targets)
    fills = any(
        isinstance(target, ast.Subscript if missing else ast.Attribute | ast.Subscript)
        and ast.unparse(target.value if missing else target) == kept
        and not kept.endswith(".grad")
        for target in stored
        if isinstance(target, ast.Attribute | ast.Subscript)
    )
    return kept if fills else ""


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.Call) and called(node.func) == "device" and node.args:
        return _texts(node.args[0])
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [text for element in node.elts for text in _texts(element)]
    return []


Wait = Callable[[str, ast.expr], None]
"""Reports a sync: gets a row of the sync table and an expression."""
Environment = dict[str, ValueKind]
Outside = Callable[[str], ValueKind]
_ARRAYS = name_set("numpy scipy pandas jax tensorflow cupy mlx polars xarray")


@dataclass
class ClassFacts:
    """Facts about `self` in a class: the kinds of its attributes, and the results of its methods."""

    name: str = ""
    attributes: Environment = field(default_factory=dict)
    returns: Environment = field(default_factory=dict)
    bases: tuple[ClassFacts, ...] = ()
    complete: bool = False

    def set(self, name: str, kind: ValueKind) -> None:
        """Record a kind assigned to an attribute, unless the class is complete."""
        if self.complete:
            return
        known = self.attributes.get(name)
        self.attributes[name] = kind if known is None else joined(known, kind)

    def attribute(self, name: str) -> ValueKind | None:
        """Return an attribute's kind, looked up here and then in base classes of the file."""
        inherited = (base.attribute(name) for base in self.bases)
        return self.attributes.get(name) or next(filter(None, inherited), None)

    def returned(self, name: str) -> ValueKind | None:
        """Return a method's result, as annotated."""
        inherited = (base.returned(name) for base in self.bases)
        return self.returns.get(name) or next(filter(None, inherited), None)


@dataclass
class FileFacts:
    """Facts about a file: its imports, its own names, and the results of its functions.

    `outside` returns the result of an imported function, given its full name.
    """

    imports: dict[str, str] = field(default_factory=dict)
    own: Environment = field(default_factory=dict)
    returns: Environment = field(default_factory=dict)
    classes: dict[str, ClassFacts] = field(default_factory=dict)
    outside: Outside = field(default=lambda full: UNKNOWN)

    @property
    def has_arrays(self) -> bool:
        """Return True if the file imports a library whose arrays share method names with tensors."""
        return any(full.partition(".")[0] in _ARRAYS for full in self.imports.values())


def changing(name: str) -> str:
    """Return the marker of a name that a later line of the loop may have rebound."""
    return f"{name} changing"


def is_self(node: ast.AST) -> bool:
    """Return True for the name `self`."""
    return isinstance(node, ast.Name) and node.id == "self"


class KindScope:
    """Kinds of names in the function being walked.

    `env` maps the function's names, `this` is the class of a method. Code does not run on a device while
    `quiet` is above 0. `yields` counts the values that generators yielded. `kinds`, if given, collects the
    kind of each expression.
    """

    def __init__(self, file: FileFacts, wait: Wait) -> None:
        self.file = file
        self.env: Environment = {}
        self.this: ClassFacts | None = None
        self.quiet = 0
        self.yields = 0
        self.kinds: dict[ast.AST, ValueKind] | None = None
        self._report = wait

    def wait(self, row: str, node: ast.expr) -> None:
        """Report a sync, unless this code does not run on a device."""
        if not self.quiet:
            self._report(row, node)

    @contextmanager
    def silent(self, on: bool = True) -> Iterator[None]:
        """Suppress reports in code that does not run on a device."""
        self.quiet += on
        try:
            yield
        finally:
            self.quiet -= on

    def narrow(self, known: Names) -> None:
        """Apply the kinds that a condition implies. Only unknown names become tensors."""
        for name, kind in known:
            if kind.what != "tensor" or self.env.get(name, UNKNOWN) == UNKNOWN:
                self.env[name] = kind

    def dotted(self, node: ast.AST) -> str | None:
        """Return the full name of an imported object, such as `torch.nn.functional.softmax`."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.env:
            return None
        full = self.file.imports.get(node.id)
        return None if full is None else ".".join([full, *reversed(parts)])
