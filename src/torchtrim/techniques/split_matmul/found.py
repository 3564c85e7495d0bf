"""Finds the modules that treat each row by itself, in a profile."""

from __future__ import annotations

from math import prod

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Profile, TensorUse
from torchtrim.records.remembered import remembered
from torchtrim.step.index import recorded_index
from torchtrim.step.step import Call, Span, Step

Places = dict[str, tuple[Span, ...]]

_PRODUCTS = ("aten::mm", "aten::addmm")
_OF_ROWS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "linear", "view", "_unsafe_view", "reshape", "detach", "alias", "clone"),
        *("gelu", "relu", "silu", "tanh", "sigmoid", "mish", "elu", "leaky_relu", "hardswish"),
        *("hardtanh", "softplus", "mul", "add", "sub", "div", "pow", "neg", "exp", "square"),
        *("relu_", "silu_", "mul_", "add_", "hardtanh_", "hardswish_", "leaky_relu_", "sqrt"),
        *("rsqrt", "clamp", "clamp_min", "native_layer_norm", "_to_copy", "unsqueeze", "squeeze"),
    )
)
_TURNS = ("aten::t", "aten::transpose", "aten::permute")


def modules_of(step: Step) -> Places:
    """Such modules, the outermost of several with the same calls, with the tasks of each of their calls."""
    return _modules_of(step.profile) if step.profile is not None else {}


@remembered
def _modules_of(profile: Profile) -> Places:
    calls = recorded_index(profile).graded_calls
    reader = _RowReader(profile)
    found: Places = {}
    for number, module in enumerate(profile.modules):
        spans = tuple(call.span for call in calls[number])
        if spans and spans not in found.values() and all(map(reader.by_rows, calls[number])):
            found[module.path] = spans
    return found


class _RowReader:
    """Reads whether calls treat each row by itself."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._once = [m.path for m in profile.modules if m.hooked or m.writes]

    def by_rows(self, call: Call) -> bool:
        """Whether one tensor goes in and one comes out, and rows never meet; at least one product's result
        is wider than both."""
        path = self._profile.modules[call.module].path
        ops = self._profile.operators[call.span.first : call.span.last]
        outer = {*call.inputs, *call.outputs}
        if len(call.inputs) != 1 or len(call.outputs) != 1 or len(outer) != len(("in", "out")):
            return False
        if any(f"{one}.".startswith(f"{path}.") for one in self._once):
            return False
        given = _first_use(ops, call.inputs[0])
        made = _first_use(ops, call.outputs[0])
        if given is None or made is None or not made.shape:
            return False
        if len(given.shape) < 2 or not _is_whole(given):
            return False
        rows = prod(given.shape[:-1])
        wide = max(
            (use.shape[-1] for op in ops if _is_product(op) for use in op.outputs), default=0
        )
        return wide > max(given.shape[-1], made.shape[-1]) and all(
            self._keeps_apart(op, rows, call) for op in ops
        )

    def _keeps_apart(self, op: Operator, rows: int, call: Call) -> bool:
        name = base_name(op.name)
        if op.random or op.phase != "forward":
            return False
        own = [use for use in (*op.inputs, *op.outputs) if not self._is_state(use)]
        if name in _TURNS:
            return not own
        if name not in _OF_ROWS or any(self._is_outside(use, call) for use in own):
            return False
        if any(self._profile.storages[n].birth < call.span.first for n in op.mutates):
            return False
        if any(_rows(use) != rows for use in own):
            return False
        return name in _PRODUCTS or all(_rows(use) == 1 for use in op.inputs if self._is_state(use))

    def _is_state(self, use: TensorUse) -> bool:
        return self._profile.storages[use.storage].kind == "parameter"

    def _is_outside(self, use: TensorUse, call: Call) -> bool:
        """Whether it is neither the input nor made within the call."""
        birth = self._profile.storages[use.storage].birth
        return use.storage not in call.inputs and not call.span.first <= birth < call.span.last


def _is_product(op: Operator) -> bool:
    return base_name(op.name) in _PRODUCTS


def _rows(use: TensorUse) -> int:
    return prod(use.shape[:-1])


def _first_use(ops: tuple[Operator, ...] | list[Operator], storage: int) -> TensorUse | None:
    """How the first operator that reads or makes a tensor sees it."""
    uses = (use for op in ops for use in (*op.inputs, *op.outputs))
    return next((use for use in uses if use.storage == storage), None)


def _is_whole(use: TensorUse) -> bool:
    """Whether its rows lie one after the other."""
    step = 1
    for size, stride in zip(reversed(use.shape), reversed(use.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
