"""Kinds of values, as inferred from source or from an annotation."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Literal, NamedTuple

from torchtrim.source.nodes import called, name_set

What = Literal[
    "unknown",
    "plain",
    "tensor",
    "sequence",
    "array",
    "device",
    "dtype",
    "layer",
    "mapping",
    "function",
]
On = Literal["", "host", "device", "mixed"]
_MOST_FUNCTIONS = 8  # arbitrary: more alternatives than real code has, so that joins stay bounded


class ValueKind(NamedTuple):
    """The kind of an expression.

    `plain`: a Python value such as a number, text, a shape or None. `sequence`: has the kind of its elements
    in `part`, and `items` by position if it is a tuple of several kinds. `layer`: a module that returns a
    tensor when called. `mapping`: has one `part` for all values, and `items` for constant string keys.
    `function`: the keys of `items` are the functions it may be, `""` for an unknown one; `part` is the
    result of one without a name. `on` is where a tensor is, or which device it is: `""` if unknown,
    `"mixed"` if computed from a host tensor and something unknown. `dtype` is `"bool"`, `"int"` or `""` for
    any other. `single`: zero-dimensional. `sure`: computed as a tensor, not only annotated as one.
    """

    what: What = "unknown"
    on: On = ""
    dtype: str = ""
    single: bool = False
    sure: bool = False
    part: ValueKind | None = None
    items: tuple[tuple[str, ValueKind], ...] = ()

    @property
    def waits(self) -> bool:
        """Return True for a tensor that may be on a device."""
        return self.what == "tensor" and self.on in ("", "device")


UNKNOWN = ValueKind()
PLAIN = ValueKind("plain")
ARRAY = ValueKind("array")
DTYPE = ValueKind("dtype")
LAYER = ValueKind("layer")
NUMBERS = ValueKind("sequence", part=PLAIN)


@cache
def tensor(on: On = "", dtype: str = "", *, single: bool = False, sure: bool = True) -> ValueKind:
    """Return a tensor's kind."""
    return ValueKind("tensor", on, dtype, single, sure)


@cache
def sequence(part: ValueKind) -> ValueKind:
    """Return the kind of a list or tuple."""
    return ValueKind("sequence", part=part)


def places(kinds: Sequence[ValueKind]) -> ValueKind:
    """Return the kind of a tuple; it keeps its elements by position if they differ."""
    part = reduce(joined, kinds) if kinds else UNKNOWN
    if len(set(kinds)) < 2:
        return sequence(part)
    return ValueKind(
        "sequence", part=part, items=tuple((str(at), kind) for at, kind in enumerate(kinds))
    )


def placed(kind: ValueKind, count: int) -> list[ValueKind] | None:
    """Return the kinds of a tuple's elements, or None unless it has `count` known ones."""
    known = kind.what == "sequence" and len(kind.items) == count
    return [item for _, item in kind.items] if known else None


def function(name: str = "", gives: ValueKind | None = None) -> ValueKind:
    """Return the kind of a function, given by name or by its result."""
    return ValueKind("function", part=gives, items=((name, UNKNOWN),) if name else ())


def mapping(items: dict[str, ValueKind], rest: ValueKind | None = None) -> ValueKind:
    """Return the kind of a dict: values by key, and the kind of all other values, if there are any."""
    kinds = [*items.values(), *([rest] if rest is not None else [])]
    return ValueKind(
        "mapping", part=reduce(joined, kinds) if kinds else None, items=tuple(items.items())
    )


def valued(kind: ValueKind, key: str | None) -> ValueKind:
    """Look up the value of a key in a mapping. The key is None if the source does not show it."""
    return dict(kind.items).get(key or "", kind.part or UNKNOWN)


@cache
def device(on: On) -> ValueKind:
    """Return a device's kind."""
    return ValueKind("device", on)


def is_open(kind: ValueKind) -> bool:
    """Return True if code may refine the kind: it is unknown, or only an annotation says tensor."""
    if kind.what == "sequence" and kind.items:
        return any(is_open(item) for _, item in kind.items)
    return kind == UNKNOWN or (kind.what == "tensor" and not kind.sure)


def refined(said: ValueKind, learned: ValueKind) -> ValueKind:
    """Return an annotation's kind, or if it leaves the kind open, the kind inferred from code."""
    if said == UNKNOWN:
        return learned
    if said.what == "tensor":
        return learned if is_open(said) and learned.what == "tensor" and learned.sure else said
    elements = placed(learned, len(said.items)) if is_open(said) else None
    if elements is None:
        return said
    return places([refined(a, b) for (_, a), b in zip(said.items, elements, strict=True)])


def part_of(kind: ValueKind) -> ValueKind:
    """Return the kind of an element, from iteration or indexing."""
    if kind.what == "sequence":
        return kind.part or UNKNOWN
    if kind.what == "tensor":
        return tensor(kind.on, kind.dtype)
    return kind if kind.what in ("plain", "array") else UNKNOWN


def joined(one: ValueKind, other: ValueKind) -> ValueKind:
    """Join two possible kinds of a value, ignoring None: a value used in a computation is not None."""
    if one == other:
        return one
    if one.what == other.what == "tensor":
        return ValueKind(
            "tensor",
            one.on if one.on == other.on else "",
            one.dtype if one.dtype == other.dtype else "",
            one.single and other.single,
            one.sure and other.sure,
        )
    if one.what == other.what == "sequence":
        theirs = placed(other, len(one.items)) if one.items else None
        if theirs is not None:
            return places([joined(a, b) for (_, a), b in zip(one.items, theirs, strict=True)])
        return sequence(joined(one.part or UNKNOWN, other.part or UNKNOWN))
    if "function" in (one.what, other.what):
        return _one_of(one, other)
    if one.what == other.what == "mapping":
        mine, yours = dict(one.items), dict(other.items)
        both = {key: joined(mine[key], yours[key]) for key in mine if key in yours}
        return mapping(both, joined(one.part or UNKNOWN, other.part or UNKNOWN))
    return UNKNOWN


def _one_of(one: ValueKind, other: ValueKind) -> ValueKind:
    either_unknown = UNKNOWN in (one, other)
    if one.what != other.what and not either_unknown:
        return UNKNOWN
    items = dict(one.items) | dict(other.items)
    if either_unknown or len(items) > _MOST_FUNCTIONS:
        items = {"": UNKNOWN} | items
    parts = [kind.part for kind in (one, other) if kind.part is not None]
    return ValueKind(
        "function",
        part=reduce(joined, parts) if parts else None,
        items=tuple(items.items())[:_MOST_FUNCTIONS],
    )


def together(*kinds: ValueKind) -> On:
    """Return the place of an operator's result. Operands of unknown place follow the known ones."""
    places: set[On] = {kind.on for kind in kinds if kind.what == "tensor"}
    if "device" in places:
        return "device"
    if not places & {"host", "mixed"} or "" in places:
        return ""
    return "mixed" if "mixed" in places or any(kind.what == "unknown" for kind in kinds) else "host"


def unsure(kind: ValueKind) -> ValueKind:
    """Return the same kind, marked as possibly not a tensor."""
    if kind.what == "sequence":
        part = None if kind.part is None else unsure(kind.part)
        items = tuple((at, unsure(item)) for at, item in kind.items)
        return kind._replace(part=part, items=items)
    return kind._replace(sure=False)


def singled(kind: ValueKind) -> ValueKind:
    """Return the same kind, marked as zero-dimensional."""
    return kind._replace(single=True)


_PLAIN = name_set("int float bool str bytes complex None Callable Path PathLike")
_SEQUENCES = name_set("list List tuple Tuple Sequence Iterable Iterator Set set")
_FLOAT = ("FloatTensor", "HalfTensor", "DoubleTensor", "BFloat16Tensor", "Tensor", "Parameter")
_DICTS = name_set("dict Dict Mapping MutableMapping")
Dotted = Callable[[ast.AST], str | None]


def annotated(node: ast.AST | None, dotted: Dotted) -> ValueKind:
    """Return the kind that an annotation names; unknown if it may be a tensor or something else.

    `dotted` resolves the full name of an imported object.
    """
    kinds = {_one(part, dotted) for part in _options(node)} - {None}
    return kinds.pop() or UNKNOWN if len(kinds) == 1 else UNKNOWN


def _options(node: ast.AST | None) -> list[ast.AST]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except (SyntaxError, ValueError):
            return []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _options(node.left) + _options(node.right)
    if isinstance(node, ast.Subscript):
        name = called(node.value)
        if name == "Optional":
            return _options(node.slice)
        if name == "Union" and isinstance(node.slice, ast.Tuple):
            return [option for part in node.slice.elts for option in _options(part)]
    return [node] if node is not None else []


def _one(node: ast.AST, dotted: Dotted) -> ValueKind | None:
    """Return the kind of one member, or None for `None`."""
    if isinstance(node, ast.Constant):
        return None if node.value is None else UNKNOWN
    if isinstance(node, ast.Subscript):
        return _several(node, dotted)
    name = dotted(node) or called(node)
    last = name.rpartition(".")[2]
    if name.startswith("torch."):
        return _of_torch(name, last)
    if name.startswith("numpy."):
        return ARRAY if last in ("ndarray", "array") else PLAIN
    if last in _DICTS:
        return mapping({}, UNKNOWN)
    return PLAIN if last in _PLAIN else UNKNOWN


def _of_torch(name: str, last: str) -> ValueKind:
    if last in _FLOAT:
        return tensor("device" if last == "Parameter" else "", sure=False)
    if last in ("LongTensor", "IntTensor", "ByteTensor"):
        return tensor("", "int", sure=False)
    if last == "BoolTensor":
        return tensor("", "bool", sure=False)
    if last in ("device", "dtype"):
        return device("") if last == "device" else DTYPE
    if name.startswith("torch.nn."):
        return LAYER if last in ("Linear", "Embedding", "LayerNorm") else UNKNOWN
    return PLAIN if last == "Size" else UNKNOWN


def _several(node: ast.Subscript, dotted: Dotted) -> ValueKind:
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    name = called(node.value)
    if name in _DICTS:
        return mapping({}, annotated(inner[-1], dotted))
    if name not in _SEQUENCES:
        return PLAIN if name in ("Callable", "Literal") else UNKNOWN
    kinds = [annotated(one, dotted) for one in inner if getattr(one, "value", None) is not ...]
    if name in ("tuple", "Tuple") and len(kinds) == len(inner):
        return places(kinds)
    return sequence(kinds[0] if len(set(kinds)) == 1 else UNKNOWN)
