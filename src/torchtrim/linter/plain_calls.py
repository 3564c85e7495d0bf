"""Infers calls of anything but torch: builtins, functions and methods of the file, containers."""

from __future__ import annotations

import ast
import builtins
from functools import reduce

from torchtrim.linter import torch_names as names
from torchtrim.linter.kinds import (
    DTYPE,
    PLAIN,
    UNKNOWN,
    ValueKind,
    function,
    joined,
    part_of,
    sequence,
    tensor,
    unsure,
    valued,
)
from torchtrim.linter.scope import ClassFacts, KindScope, is_self
from torchtrim.linter.torch_calls import InferredCall, called_function, called_method
from torchtrim.source.nodes import called, name_set
from torchtrim.source.operations import SYNCHRONIZING

KNOWN_MODULES = ("torch.", "numpy.", "math.", "time.", "os.", "scipy.", "PIL.", "cv2.")
_SELF = "self."
_BUILTIN = frozenset(name for name in dir(builtins) if name.islower())


def referred(scope: KindScope, node: ast.expr | None) -> ValueKind:
    """Return the kind of a function that an expression names without calling it.

    Recognizes functions of torch, functions of the file, builtins and methods of `self`. Only names in lower
    case and torch's layers count as functions.
    """
    if isinstance(node, ast.IfExp):
        return joined(referred(scope, node.body), referred(scope, node.orelse))
    if isinstance(node, ast.Call) and scope.dotted(node.func) == "functools.partial" and node.args:
        return referred(scope, node.args[0])
    if isinstance(node, ast.Name) and _is_named(scope, node.id):
        return function(node.id)
    this = scope.this
    if (
        isinstance(node, ast.Attribute)
        and is_self(node.value)
        and this
        and this.returned(node.attr)
    ):
        return function(f"{_SELF}{node.attr}")
    full = scope.dotted(node) if node is not None else None
    return function(full) if full is not None and _is_function(full) else UNKNOWN


def _called(scope: KindScope, name: str, call: InferredCall) -> ValueKind:
    if name.startswith(KNOWN_MODULES):
        return called_function(name, call)
    if name.startswith(_SELF):
        return (scope.this.returned(name[len(_SELF) :]) if scope.this else None) or UNKNOWN
    return scope.file.returns.get(name) or scope.file.outside(name)


def _is_named(scope: KindScope, name: str) -> bool:
    if name in scope.file.returns:
        return name not in scope.env
    known = (scope.env, scope.file.imports, scope.file.own, scope.file.classes)
    return name in _BUILTIN and not any(name in one for one in known)


def _is_function(full: str) -> bool:
    head, _, last = full.rpartition(".")
    if full.startswith("torch."):
        return last in names.FUNCTIONS | names.FUNCTIONAL or last in names.LAYERS
    return bool(head) and last.islower()


_READS = ("float", "int", "bool", "complex", "range", "round", "str", "format", "print", "repr")
_PLAIN_CALLS = name_set("""
    len isinstance hasattr issubclass id type callable hash ord chr dict open input bin hex oct
    divmod vars dir pow
""")
_OF_DATA = name_set("abs bfloat16 cpu cuda double float half norm")
"""Methods that `x.data` has only if `x` is a tensor."""
_ELEMENTS = name_set("list tuple set sorted reversed iter")
_NUMBERS = {"tolist": sequence(PLAIN), "item": PLAIN}


def called_name(scope: KindScope, function: ast.Name, call: InferredCall) -> ValueKind:
    """Infer the call of a plain name."""
    name = function.id
    if (known := scope.env.get(name)) is not None:
        return called_held(scope, known, call)
    if name in scope.file.returns:
        return scope.file.returns[name]
    if name in scope.file.imports:
        full = scope.file.imports[name]
        if full.rpartition(".")[2] in SYNCHRONIZING and not call.args:
            scope.wait("synchronize", call.node)
        return scope.file.outside(full)
    return _builtin(scope, name, call)


def called_held(scope: KindScope, held: ValueKind, call: InferredCall) -> ValueKind:
    """Infer the call of a value held by a name, an attribute or an item.

    If it may be one of several functions, report no syncs and join the results of the known ones. If one of
    them is unknown, the result is not surely a tensor.
    """
    if held.what != "function":
        return tensor() if held.what == "layer" else UNKNOWN
    functions = [name for name, _ in held.items]
    with scope.silent(len(functions) + (held.part is not None) > 1):
        results = {name: _called(scope, name, call) for name in functions}
    known = [kind for name, kind in results.items() if kind != UNKNOWN or name in _BUILTIN]
    is_open = len(known) < len(functions)
    if held.part is not None:
        known.append(held.part)
    result = reduce(joined, known) if known else UNKNOWN
    return unsure(result) if is_open else result


def _builtin(scope: KindScope, name: str, call: InferredCall) -> ValueKind:
    read = [kind for kind in call.args if kind.waits]
    if name == "round" and read:
        return read[0]
    if name in _READS:
        if read:
            scope.wait("item", call.node)
        return sequence(PLAIN) if name == "range" else PLAIN
    if name in ("max", "min"):
        return _greatest(scope, call, read)
    first = call.args[0] if call.args else None
    inner = PLAIN if first is None else part_of(first)
    if name in ("any", "all"):
        if inner.waits and inner.sure:
            scope.wait("item", call.node)
        return PLAIN
    if name == "sum":
        return inner
    if name == "abs":
        return PLAIN if first is None else first
    if name == "getattr":
        return PLAIN if first == PLAIN else UNKNOWN
    if name in _ELEMENTS:
        return sequence(UNKNOWN if first is None else inner)
    return PLAIN if name in _PLAIN_CALLS else UNKNOWN


def _greatest(scope: KindScope, call: InferredCall, read: list[ValueKind]) -> ValueKind:
    args = call.args
    inner = part_of(args[0]) if len(args) == 1 else PLAIN
    if (len(args) > 1 and any(kind.sure for kind in read)) or (inner.waits and inner.sure):
        scope.wait("item", call.node)
    if len(args) == 1:
        return inner
    return read[0] if read else PLAIN if all(k.what == "plain" for k in args) else UNKNOWN


def called_on(
    scope: KindScope, owner: ast.expr, receiver: ValueKind, method: str, call: InferredCall
) -> ValueKind:
    """Infer a method call on a receiver; `owner` is the receiver's expression."""
    if method == "backward" and receiver.what == "plain":
        _mark_tensor(scope, owner)  # whatever an annotation says
    if receiver.what == "tensor":
        return called_method(receiver, method, call)
    if receiver.what in ("plain", "array"):
        return _NUMBERS.get(method, receiver)
    if receiver.what == "mapping":
        return _of_dict(receiver, method, call)
    if receiver.what != "sequence":
        return _of_unknown(scope, owner, method, call)
    if method == "append" and isinstance(owner, ast.Name) and call.args:
        part = receiver.part or UNKNOWN
        new = call.args[0] if part == UNKNOWN else joined(part, call.args[0])
        scope.env[owner.id] = sequence(new)
        return PLAIN
    return part_of(receiver) if method == "pop" else UNKNOWN


def own_method(scope: KindScope, this: ClassFacts, method: str, call: InferredCall) -> ValueKind:
    """Infer `self.method(...)` in a method of the class `this`."""
    if method == "register_buffer" and isinstance(call.first, ast.Constant):
        kind = call.given(1, "tensor") or UNKNOWN
        this.set(str(call.first.value), tensor("", kind.dtype))
        return PLAIN
    known = this.attribute(method)
    if known is not None and known.what in ("layer", "function"):
        return called_held(scope, known, call)
    return this.returned(method) or UNKNOWN


def _of_dict(receiver: ValueKind, method: str, call: InferredCall) -> ValueKind:
    if method == "values":
        return sequence(receiver.part or UNKNOWN)
    if method == "keys":
        return sequence(PLAIN)
    if method == "copy":
        return receiver
    if method not in ("get", "pop", "setdefault") or call.first is None:
        return UNKNOWN
    key = call.first.value if isinstance(call.first, ast.Constant) else None
    return valued(receiver, key if isinstance(key, str) else None)


def _of_unknown(scope: KindScope, owner: ast.expr, method: str, call: InferredCall) -> ValueKind:
    if method in names.ONLY_TENSORS:
        _mark_tensor(scope, owner)
        return called_method(tensor(), method, call)
    if _is_of_a_tensor(scope, owner, method, call) or (method == "item" and _is_loss(owner)):
        if scope.kinds is not None:
            scope.kinds[owner] = tensor()
        return called_method(tensor(), method, call)
    if method in names.DEVICE_TENSORS:
        call.wait("new-tensor", call.node)
        return tensor("device")
    if method in ("backward", "manual_backward"):
        _mark_tensor(scope, call.first or owner)  # `loss.backward()`, `accelerator.backward(loss)`
    if method in ("clip_grad_norm_", "to_local", "full_tensor"):
        return tensor(single=method == "clip_grad_norm_")
    if method == "synchronize" and not call.args and not call.words:
        _synchronized(scope, owner, call)
    if method in ("size", "tolist"):
        return sequence(PLAIN) if not call.args else PLAIN
    if method in ("item", "stride", "dim", "data_ptr"):
        return PLAIN
    return DTYPE if method == "get_default_dtype" else UNKNOWN


def _is_of_a_tensor(scope: KindScope, owner: ast.expr, method: str, call: InferredCall) -> bool:
    """Return True if a method that arrays share belongs to a tensor: it has `dim=`, it is called on `x.data`,
    or the file uses no arrays."""
    if "dim" in call.words:
        return method in names.METHODS
    if method in _OF_DATA and isinstance(owner, ast.Attribute) and owner.attr == "data":
        return True
    plain = not call.args and not call.words and not scope.file.has_arrays
    return plain and (method in names.REDUCTIONS or method == "item")


def _is_loss(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):
        node = node.slice if isinstance(node.slice, ast.Constant) else node.value
    name = getattr(node, "id", getattr(node, "attr", getattr(node, "value", "")))
    return isinstance(name, str) and (name == "loss" or name.endswith("_loss"))


def communicated(scope: KindScope, function: ast.expr, call: InferredCall) -> None:
    """Infer `dist.all_reduce(x)`, of torch or of a wrapper: ranks exchange tensors."""
    if called(function) not in names.COLLECTIVES:
        return
    for argument in call.node.args[:2]:
        if isinstance(argument, ast.Name) and scope.env.get(argument.id) == UNKNOWN:
            scope.env[argument.id] = tensor()


def _mark_tensor(scope: KindScope, node: ast.expr) -> None:
    """Record that a name refers to a tensor, unless it is imported."""
    if isinstance(node, ast.Name) and node.id not in scope.file.imports:
        scope.env[node.id] = tensor()


def _synchronized(scope: KindScope, owner: ast.expr, call: InferredCall) -> None:
    text = ast.unparse(owner).lower().rpartition(".")[2]
    rows = {
        "event": "event-synchronize",
        "stream": "stream-synchronize",
        "accelerator": "synchronize",
    }
    if (row := next((rows[word] for word in rows if word in text), None)) is not None:
        scope.wait(row, call.node)
