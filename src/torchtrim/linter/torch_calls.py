"""Infers calls of torch and reports their syncs, from the kinds of the arguments."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from torchtrim.linter import torch_names as names
from torchtrim.linter.kinds import (
    ARRAY,
    DTYPE,
    LAYER,
    NUMBERS,
    PLAIN,
    UNKNOWN,
    On,
    ValueKind,
    device,
    part_of,
    sequence,
    singled,
    tensor,
    together,
)
from torchtrim.linter.scope import Wait
from torchtrim.source.nodes import called, name_set

_MASKED = ("torch.cuda.", "torch.accelerator.", "torch.xpu.")
_COLLECTIVES = ("torch.distributed._functional_collectives.",)
_HOST_DATA = ("plain", "sequence", "array", "unknown")
_SIZES = name_set("""
    zeros ones empty full rand randn new_zeros new_ones new_empty new_full eye
""")
_SHAPED = name_set("view reshape expand repeat new_zeros new_ones new_empty new_full")
_NEVER_SINGLE = name_set("stack cat unsqueeze expand repeat view reshape")
_FLOATS = name_set("float half double bfloat16 mean softmax log_softmax")
_SOLVERS = {
    "eigh": "eigh",
    "eigvalsh": "eigh",
    "svd": "svd",
    "svdvals": "svd",
    "cholesky": "linalg-check",
    "inv": "linalg-check",
    "solve": "linalg-check",
    "eig": "eig",
    "eigvals": "eig",
    "lstsq": "lstsq",
    "matrix_exp": "matrix-exp",
}
_COUNTING = {
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "masked_select": "masked-select",
    "equal": "equal",
    "allclose": "allclose",
}


@dataclass(frozen=True)
class InferredCall:
    """A call with inferred arguments."""

    node: ast.Call
    args: tuple[ValueKind, ...]
    words: dict[str, ValueKind]
    wait: Wait

    def given(self, position: int, *keywords: str) -> ValueKind | None:
        """Return the argument at a position or of one of the keywords, or None."""
        by_word = (self.words[word] for word in keywords if word in self.words)
        return next(by_word, self.args[position] if position < len(self.args) else None)

    def true(self, keyword: str) -> bool:
        """Return True if a keyword is the constant `True`."""
        value = self.keyword(keyword)
        return isinstance(value, ast.Constant) and bool(value.value)

    @property
    def first(self) -> ast.expr | None:
        """The first positional argument."""
        return self.node.args[0] if self.node.args else None

    def keyword(self, *names: str) -> ast.expr | None:
        """Return the expression passed for the first keyword with one of the names."""
        return next((word.value for word in self.node.keywords if word.arg in names), None)


def called_function(name: str, call: InferredCall) -> ValueKind:
    """Infer a function by full name, such as `torch.nn.functional.softmax`."""
    head, _, last = name.rpartition(".")
    if last == "synchronize" and name.startswith(_MASKED):
        call.wait("synchronize", call.node)
    if head in ("torch", "torch.Tensor"):
        return _of_torch(last, call)
    if head == "torch.nn.functional":
        return _of_functional(last, call)
    if head in ("torch.linalg", "torch.fft", "torch.special"):
        return _of_linalg(last, call, head)
    if head.startswith("torch.nn") and last in ("Parameter", "Buffer"):
        return tensor()
    if head == "torch.nn" or head.startswith("torch.nn.modules"):
        return LAYER if last in names.LAYERS else UNKNOWN
    if name.startswith(_COLLECTIVES) or last == "clip_grad_norm_":
        return tensor(single=last == "clip_grad_norm_")
    if name.startswith("torch.cuda.") and last.endswith("Tensor"):
        call.wait("new-tensor", call.node)
        return tensor("device")
    if head in ("math", "os", "time", "sys", "re", "os.path"):
        return PLAIN
    return ARRAY if name.startswith(("numpy.", "scipy.", "PIL.", "cv2.")) else UNKNOWN


def called_method(receiver: ValueKind, method: str, call: InferredCall) -> ValueKind:
    """Infer a method of a tensor."""
    if method in ("item", "tolist"):
        if receiver.waits:
            call.wait("item" if method == "item" else "copy-to-host", call.node)
        return PLAIN if method == "item" or receiver.single else NUMBERS
    if method in ("cpu", "cuda", "to", "type", "type_as"):
        return _moved(receiver, method, call)
    if method in ("numpy", "__array__"):
        return ARRAY
    if method in names.PLAIN_METHODS:
        return sequence(PLAIN) if method in ("size", "stride") and not call.args else PLAIN
    if method in names.NEW:
        return _new(receiver, method, call)
    _count(method, receiver, call)
    _shape_of(method, call)
    if method in _SOLVERS and receiver.waits and method not in ("solve", "inv"):
        call.wait(_SOLVERS[method], call.node)
    return _result(method, (receiver, *call.args), call, first=1)


def _of_torch(last: str, call: InferredCall) -> ValueKind:
    if last == "device":
        return device(_device_of(call.first))
    if last in ("tensor", "as_tensor", "asarray", "from_numpy") or last.endswith("Tensor"):
        return _from_data(last, call)
    if last in names.FACTORIES:
        return _made(last, call)
    if last in names.LIKE:
        return _placed(last, call, call.args[0].on if call.args else "")
    if last == "where" and len(call.args) == 1 and not call.words:
        _count("nonzero", call.args[0], call)
        return sequence(tensor(call.args[0].on, "int"))
    if last in ("equal", "allclose"):
        _count(last, call.args[0] if call.args else UNKNOWN, call)
        return PLAIN
    if last in names.PLAIN_METHODS:
        return PLAIN
    if last in names.FUNCTIONS:
        _count(last, _tensor_like(call.given(0, "input")), call, first=1)
        if last in _SOLVERS and last != "solve":
            _solved(last, call)
        return _result(last, call.args, call, first=1)
    if last in names.DTYPES:
        return DTYPE
    return UNKNOWN if last in ("load", "jit", "compile", "vmap", "func") else PLAIN


def _of_functional(last: str, call: InferredCall) -> ValueKind:
    open_ended = last == "one_hot" and call.given(1, "num_classes") is None
    if open_ended and _tensor_like(call.given(0, "input", "tensor")).waits:
        call.wait("item", call.node)
    if last not in names.FUNCTIONAL or last == "embedding_bag":
        return UNKNOWN
    made = _result(last, call.args, call, first=1)
    reduced = last in names.LOSSES and "reduction" not in call.words
    return singled(made) if reduced and made.what == "tensor" else made


def _of_linalg(last: str, call: InferredCall, head: str) -> ValueKind:
    if head == "torch.linalg" and last in _SOLVERS:
        _solved(last, call)
    if last in names.SEVERAL:
        return sequence(tensor(together(*call.args)))
    return _result(last, call.args, call, first=1)


def _solved(last: str, call: InferredCall) -> None:
    if _tensor_like(call.given(0, "input", "A")).waits:
        call.wait(_SOLVERS[last], call.node)


def _tensor_like(kind: ValueKind | None) -> ValueKind:
    """Treat an unknown argument of a torch function as a tensor."""
    return tensor() if kind is None or kind.what == "unknown" else kind


def _count(last: str, first_kind: ValueKind, call: InferredCall, first: int = 0) -> None:
    """Report results whose shape depends on data, and truth values of tensors."""
    if not first_kind.waits:
        return
    if last in _COUNTING:
        compares = last in ("equal", "allclose", "masked_select")
        if not compares or all(kind.on != "host" for kind in call.args[first:]):
            call.wait(_COUNTING[last], call.node)
    elif last == "unique":
        call.wait("unique-dim" if call.given(first + 3, "dim") is not None else "unique", call.node)
    elif last == "repeat_interleave" and "output_size" not in call.words:
        if (call.given(first, "repeats") or first_kind).waits:
            call.wait("repeat-interleave", call.node)
    elif last in ("add", "sub", "add_", "sub_"):
        alpha = call.words.get("alpha", PLAIN)
        if alpha.waits and alpha.sure:
            call.wait("item", call.node)
    elif last in ("masked_fill", "masked_fill_"):
        value = call.given(first + 1, "value") or PLAIN
        if value.waits and value.sure:
            call.wait("masked-fill-value", call.node)


def _shape_of(method: str, call: InferredCall) -> None:
    sizes = call.args[:1] if method.startswith("new_") else call.args
    if method in _SHAPED and any(map(_is_read, sizes)):
        call.wait("item", call.node)


def _is_read(kind: ValueKind) -> bool:
    """Return True if a device tensor is passed for a number."""
    inner = part_of(kind) if kind.what == "sequence" else kind
    return inner.waits and inner.sure and inner.single


def _made(last: str, call: InferredCall) -> ValueKind:
    """Infer a factory's result: on the host, unless it gets a device."""
    if last in ("arange", "linspace", "logspace"):
        for kind in call.args[:2]:
            if kind.waits and kind.sure:
                call.wait("range-bounds", call.node)
    elif last in _SIZES and any(map(_is_read, (*call.args, *call.words.values()))):
        call.wait("item", call.node)
    deviation = call.given(1, "std") if last == "normal" else None
    if deviation is not None and deviation.waits:
        call.wait("normal-std", call.node)
        return tensor(deviation.on)
    made = _placed(last, call, "host")
    if last == "arange" and all(kind.dtype == "int" for kind in call.args):
        return made._replace(dtype="int")
    return singled(made) if last == "scalar_tensor" else made


def _placed(last: str, call: InferredCall, otherwise: On) -> ValueKind:
    dtype = "bool" if last in names.BOOL else "int" if last in names.INT else ""
    dtype = call.words["dtype"].dtype if "dtype" in call.words else dtype
    return tensor(_device_word(call, otherwise), dtype)


def _device_word(call: InferredCall, otherwise: On) -> On:
    """Resolve a call's `device=`, constant device names included. Unknown devices count as accelerators."""
    if (kind := call.words.get("device")) is None:
        return otherwise
    if named := _device_of(call.keyword("device")):
        return named
    if kind.what == "plain":
        return otherwise
    return kind.on or "device" if kind.what == "device" else "device"


def _new(receiver: ValueKind, method: str, call: InferredCall) -> ValueKind:
    if method == "new_tensor" and receiver.waits and "device" not in call.words:
        data = call.given(0, "data") or PLAIN
        _read_data(data, call)
        if data.what in ("plain", "sequence", "array") and not part_of(data).waits:
            call.wait("new-tensor", call.node)
    _shape_of(method, call)
    made = _placed(method, call, receiver.on)
    return made if "dtype" in call.words else made._replace(dtype=receiver.dtype)


def _from_data(last: str, call: InferredCall) -> ValueKind:
    data = call.given(0, "data") or PLAIN
    made = _placed(last, call, "host")
    if last in ("as_tensor", "asarray") and data.what in ("unknown", "tensor"):
        return made if "device" in call.words else tensor(data.on if data.what == "tensor" else "")
    if data.what == "tensor":
        return tensor(made.on if "device" in call.words else data.on, made.dtype)
    sized = last not in ("tensor", "as_tensor", "asarray", "from_numpy") and data.what == "plain"
    _read_data(data, call)
    inner = part_of(data)
    if made.on == "device" and data.what in _HOST_DATA and not sized and inner.what != "tensor":
        call.wait("new-tensor", call.node)
    literal = isinstance(call.first, ast.Constant)
    return singled(made) if literal and last in ("tensor", "as_tensor") else made


def _read_data(data: ValueKind, call: InferredCall) -> None:
    """Report data that consists of device tensors, which are read one by one."""
    inner = part_of(data) if data.what == "sequence" else PLAIN
    if inner.waits and inner.sure:
        call.wait("item", call.node)


def _moved(receiver: ValueKind, method: str, call: InferredCall) -> ValueKind:
    """Infer `.to`, `.cpu` and `.cuda`: where the result is, and whether the copy blocks."""
    on, dtype = receiver.on, receiver.dtype
    target = call.given(0, "device", "other")
    if method == "cpu":
        on = "host"
    elif method == "cuda":
        on = "device"
    elif method == "to" and target is not None:
        on, dtype = _target(receiver, target, call)
    elif target is not None and target.what == "dtype":
        dtype = target.dtype
    free = call.true("non_blocking")
    if on == "host" and receiver.waits and not free:
        call.wait("copy-to-host", call.node)
    if on == "device" and receiver.on == "host" and not free:
        call.wait("upload", call.node)
    return receiver._replace(on=on, dtype=dtype, sure=True)


def _target(receiver: ValueKind, target: ValueKind, call: InferredCall) -> tuple[On, str]:
    """Return the place and the type after `.to(target)`. An unknown target's place follows from its name,
    such as `self.device` or `target_device`."""
    if target.what == "dtype":
        return receiver.on, target.dtype
    if target.what == "tensor":
        return target.on, target.dtype
    argument = call.first or call.keyword("device", "other")
    if isinstance(argument, ast.Constant):
        return _device_of(argument), receiver.dtype
    if target.what == "device":
        return target.on or "device", receiver.dtype
    name = called(argument) if argument is not None else ""
    named = name == "device" or name.endswith("_device")
    return "device" if receiver.on == "host" and named else "", receiver.dtype


def _device_of(node: ast.expr | None) -> On:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "host" if node.value.partition(":")[0] in ("cpu", "meta") else "device"
    return ""


def _result(
    last: str, operands: tuple[ValueKind, ...], call: InferredCall, first: int
) -> ValueKind:
    """Infer an operator's result. `first` is the index of a method's first own argument."""
    parts = [part_of(kind) if kind.what == "sequence" else kind for kind in operands]
    parts += [kind for word, kind in call.words.items() if word in ("other", "input", "tensors")]
    on = _device_word(call, together(*parts))
    if last in names.SEVERAL or _gives_two(last, operands, call, first):
        return sequence(tensor(on))
    dtype = call.words["dtype"].dtype if "dtype" in call.words else _dtype(last, parts)
    single = bool(parts) and all(kind.single or kind.what == "plain" for kind in parts)
    if last in _NEVER_SINGLE:
        single = False
    elif last in names.REDUCTIONS and len(operands) <= first:
        single = single or not {"dim", "axis", "keepdim"} & call.words.keys()
    return tensor(on, dtype, single=single)


def _dtype(last: str, parts: list[ValueKind]) -> str:
    if last in names.BOOL:
        return "bool"
    if last in names.INT:
        return "int"
    if last in _FLOATS:
        return ""
    if last in ("sum", "cumsum"):
        return "int" if parts and parts[0].dtype else ""
    types = {kind.dtype for kind in parts if kind.what == "tensor"}
    return types.pop() if len(types) == 1 else ""


def _gives_two(last: str, operands: tuple[ValueKind, ...], call: InferredCall, first: int) -> bool:
    """Return True for values with indices: `x.max(1)`, but not `x.max()` or `torch.max(x, y)`."""
    if last == "unique":
        return any(word.startswith("return_") for word in call.words)
    if last == "nonzero":
        return call.true("as_tuple")
    if last not in ("max", "min", "median", "nanmedian"):
        return False
    if len(operands) <= first:
        return "dim" in call.words
    if operands[first].what == "unknown":
        # A named argument is a tensor, unless it is named like a dimension.
        name = called(call.node.args[-1]) if call.node.args else ""
        return not name or "dim" in name or "axis" in name
    return operands[first].what != "tensor"
