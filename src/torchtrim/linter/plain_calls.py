"""Calls of what is no function of torch: builtins, functions and methods of the file, lists, the unknown."""

from __future__ import annotations

import ast

from torchtrim.linter import functions
from torchtrim.linter import torch_names as names
from torchtrim.linter.kinds import (
    DTYPE,
    PLAIN,
    UNKNOWN,
    Kind,
    joined,
    part_of,
    sequence,
    tensor,
    valued,
)
from torchtrim.linter.scope import Scope
from torchtrim.linter.torch_calls import Call, called_method

_READS = ("float", "int", "bool", "complex", "range", "round", "str", "format", "print", "repr")
_PLAIN_NAMES = """
    len isinstance hasattr issubclass id type callable hash ord chr dict open input bin hex oct divmod
    vars dir pow
"""
_PLAIN_CALLS = frozenset(_PLAIN_NAMES.split())
_ELEMENTS = frozenset(("list", "tuple", "set", "sorted", "reversed", "iter"))
_NUMBERS = {"tolist": sequence(PLAIN), "item": PLAIN}


def called_name(scope: Scope, function: ast.Name, call: Call) -> Kind:
    """What a function of the file's, or a builtin one, gives."""
    name = function.id
    known = scope.env.get(name)
    if known is not None:
        return called_held(scope, known, call)
    if name in scope.file.returns:
        return scope.file.returns[name]
    if name in scope.file.imports:
        return scope.file.outside(scope.file.imports[name])
    return _builtin(scope, name, call)


def called_held(scope: Scope, held: Kind, call: Call) -> Kind:
    """What calling the value of a name, an attribute or a place gives."""
    if held.what == "function":
        return functions.called(scope, held, call)
    return tensor() if held.what == "layer" else UNKNOWN


def _builtin(scope: Scope, name: str, call: Call) -> Kind:
    args = call.args
    read = [kind for kind in args if kind.waits]
    if name in _READS:
        if read and name != "round":
            scope.wait("item", call.node)
        if name == "range":
            return sequence(PLAIN)
        return PLAIN if name != "round" or not read else read[0]
    if name in ("max", "min"):
        return _greatest(scope, call, read)
    if name in ("any", "all"):
        inner = part_of(args[0]) if args else PLAIN
        if inner.waits and inner.sure and args[0].what != "unknown":
            scope.wait("item", call.node)
        return PLAIN
    if name == "sum":
        return part_of(args[0]) if args else PLAIN
    if name == "abs":
        return args[0] if args else PLAIN
    if name == "getattr":
        return PLAIN if args[:1] == (PLAIN,) else UNKNOWN
    if name in _ELEMENTS:
        return sequence(part_of(args[0])) if args else sequence(UNKNOWN)
    return PLAIN if name in _PLAIN_CALLS else UNKNOWN


def _greatest(scope: Scope, call: Call, read: list[Kind]) -> Kind:
    args = call.args
    inner = part_of(args[0]) if len(args) == 1 else PLAIN
    if (len(args) > 1 and any(kind.sure for kind in read)) or (inner.waits and inner.sure):
        scope.wait("item", call.node)
    if len(args) == 1:
        return inner
    return read[0] if read else PLAIN if all(k.what == "plain" for k in args) else UNKNOWN


def called_on(scope: Scope, owner: ast.expr, receiver: Kind, method: str, call: Call) -> Kind:
    """What a method gives of a receiver, which is in the source as `owner`."""
    if receiver.what == "tensor":
        return called_method(receiver, method, call)
    if receiver.what in ("plain", "array"):
        return _NUMBERS.get(method, receiver)
    if receiver.what == "mapping":
        return _of_dict(receiver, method, call)
    if receiver.what == "sequence":
        return _of_list(scope, owner, receiver, method, call)
    return _of_unknown(scope, owner, method, call)


def own_method(scope: Scope, method: str, call: Call) -> Kind:
    """What `self.method(...)` gives."""
    assert scope.this is not None
    first = call.node.args[0] if call.node.args else None
    if method == "register_buffer" and isinstance(first, ast.Constant):
        kind = call.given(1, "tensor") or UNKNOWN
        scope.this.set(str(first.value), tensor("", kind.dtype))
        return PLAIN
    known = scope.this.attribute(method)
    if known is not None and known.what in ("layer", "function"):
        return called_held(scope, known, call)
    return scope.this.returned(method) or UNKNOWN


def _of_dict(receiver: Kind, method: str, call: Call) -> Kind:
    if method == "values":
        return sequence(receiver.part or UNKNOWN)
    if method == "keys":
        return sequence(PLAIN)
    if method == "copy":
        return receiver
    first = call.node.args[0] if call.node.args else None
    if method not in ("get", "pop", "setdefault") or first is None:
        return UNKNOWN
    known = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return valued(receiver, first.value if known else None)  # type: ignore[attr-defined]


def _of_list(scope: Scope, owner: ast.expr, receiver: Kind, method: str, call: Call) -> Kind:
    if method == "append" and isinstance(owner, ast.Name) and call.args:
        part = receiver.part or UNKNOWN
        new = call.args[0] if part == UNKNOWN else joined(part, call.args[0])
        scope.env[owner.id] = sequence(new)
        return PLAIN
    return part_of(receiver) if method == "pop" else UNKNOWN


def _of_unknown(scope: Scope, owner: ast.expr, method: str, call: Call) -> Kind:
    if method in names.ONLY_TENSORS:
        found = tensor()
        if isinstance(owner, ast.Name) and owner.id not in scope.file.imports:
            scope.env[owner.id] = found
        return called_method(found, method, call)
    if _is_of_a_tensor(scope, method, call) or (method == "item" and _is_loss(owner)):
        return called_method(tensor(), method, call)
    if method in names.DEVICE_TENSORS:
        call.wait("new-tensor", call.node)
        return tensor("device")
    if method in ("backward", "manual_backward"):
        _differentiated(scope, owner, call)
    if method in ("clip_grad_norm_", "to_local", "full_tensor"):
        return tensor(single=method == "clip_grad_norm_")
    if method == "synchronize" and not call.args and not call.words:
        _synchronized(scope, owner, call)
    if method in ("size", "tolist"):
        return sequence(PLAIN) if not call.args else PLAIN
    if method in ("item", "stride", "dim", "data_ptr"):
        return PLAIN
    return DTYPE if method == "get_default_dtype" else UNKNOWN


def _is_of_a_tensor(scope: Scope, method: str, call: Call) -> bool:
    """Whether a method that arrays have too is one of a tensor: by `dim=`, or as the file has no arrays."""
    if "dim" in call.words:
        return method in names.METHODS
    plain = not call.args and not call.words and not scope.file.has_arrays
    return plain and (method in names.REDUCTIONS or method == "item")


def _is_loss(node: ast.expr) -> bool:
    """Whether it has the name of a loss, by itself or as the key of a dict."""
    if isinstance(node, ast.Subscript):
        node = node.slice if isinstance(node.slice, ast.Constant) else node.value
    name = getattr(node, "id", getattr(node, "attr", getattr(node, "value", "")))
    return isinstance(name, str) and (name == "loss" or name.endswith("_loss"))


def communicated(scope: Scope, function: ast.expr, call: Call) -> None:
    """`dist.all_reduce(x)`, of torch or of what wraps it: what ranks exchange is a tensor."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in names.COLLECTIVES:
        return
    for one in call.node.args[:2]:
        if isinstance(one, ast.Name) and scope.env.get(one.id) == UNKNOWN:
            scope.env[one.id] = tensor()


def _differentiated(scope: Scope, owner: ast.expr, call: Call) -> None:
    """`loss.backward()`, `accelerator.backward(loss)`: the loss is a tensor."""
    loss = call.node.args[0] if call.node.args else owner
    if isinstance(loss, ast.Name) and loss.id not in scope.file.imports:
        scope.env[loss.id] = tensor()


def _synchronized(scope: Scope, owner: ast.expr, call: Call) -> None:
    text = ast.unparse(owner).lower().rpartition(".")[2]
    if "event" in text:
        scope.wait("event-synchronize", call.node)
    elif "stream" in text:
        scope.wait("stream-synchronize", call.node)
    elif "accelerator" in text:
        scope.wait("synchronize", call.node)
