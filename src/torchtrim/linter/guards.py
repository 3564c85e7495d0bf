"""What a condition says of its branches: code that no device runs, and what names are there."""

from __future__ import annotations

import ast
from typing import NamedTuple

from torchtrim.linter.kinds import ARRAY, PLAIN, Kind, tensor

_NEVER_NAMES = """
    is_scripting is_tracing is_compiling is_dynamo_compiling is_torchdynamo_compiling is_exporting
    is_torch_fx_proxy is_fx_tracing is_in_onnx_export is_onnx_exporting is_tracing_or_scripting
    is_torchdynamo_exporting is_jit_tracing is_torch_xla_available is_tensor_or_proxy_tracing
"""
_NEVER = frozenset(_NEVER_NAMES.split())
_DEVICES = ("cuda", "xpu", "gpu", "npu")
_PLAIN_TYPES_NAMES = """
    int float bool str list tuple dict bytes set Number Integral Real
"""
_PLAIN_TYPES = frozenset(_PLAIN_TYPES_NAMES.split())
_IS_TENSOR = ("is_tensor", "is_torch_tensor")
Names = tuple[tuple[str, Kind], ...]


class Guard(NamedTuple):
    """Of a condition: whether no device runs what it guards when true, and when false; and what names are."""

    true: bool = False
    false: bool = False
    when_true: Names = ()
    when_false: Names = ()


NONE = Guard()


def guard(test: ast.expr) -> Guard:
    """What a condition says."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = guard(test.operand)
        return Guard(inner.false, inner.true, inner.when_false, inner.when_true)
    if isinstance(test, ast.BoolOp):
        return _several(test)
    if isinstance(test, ast.Call):
        return _call(test)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compared(test.left, test.ops[0], test.comparators[0])
    name = _last(test)
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
    name = _last(test.func)
    if name in _NEVER:
        return Guard(true=True)
    if name == "is_available" and _last(getattr(test.func, "value", test)) in _DEVICES:
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
    lasts = {_last(one) for one in members}
    if lasts <= {"Tensor", "LongTensor", "FloatTensor", "BoolTensor", "Parameter"}:
        return Guard(when_true=((name, tensor()),), when_false=((name, PLAIN),))
    if lasts <= {"ndarray", "generic"}:
        return Guard(when_true=((name, ARRAY),))
    return Guard(when_true=((name, PLAIN),)) if lasts <= _PLAIN_TYPES else NONE


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Guard:
    """`x.device.type == "cpu"`, `device != torch.device("cuda")`."""
    if not isinstance(operator, ast.Eq | ast.NotEq | ast.In | ast.NotIn):
        return NONE
    named = _last(left) in ("type", "device", "device_type") or "device" in _last(left)
    values = _texts(right)
    if not named or not values:
        return NONE
    devices = {value.partition(":")[0] in _DEVICES for value in values}
    if len(devices) != 1:
        return NONE
    on_device = devices.pop()
    found = Guard(true=not on_device, false=on_device)
    if isinstance(operator, ast.NotEq | ast.NotIn):
        return Guard(found.false, found.true)
    return found


def _texts(node: ast.expr) -> list[str]:
    """The names of devices that an expression spells."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.Call) and _last(node.func) == "device" and node.args:
        return _texts(node.args[0])
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return [text for one in node.elts for text in _texts(one)]
    return []


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
