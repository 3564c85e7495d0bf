"""What an annotation says that a value is."""

from __future__ import annotations

import ast
from collections.abc import Callable

from torchtrim.linter.kinds import (
    ARRAY,
    DTYPE,
    LAYER,
    PLAIN,
    UNKNOWN,
    Kind,
    device,
    mapping,
    places,
    sequence,
    tensor,
)

_PLAIN_NAMES = """
    int float bool str bytes complex None Callable Path PathLike
"""
_PLAIN = frozenset(_PLAIN_NAMES.split())
_SEQUENCES_NAMES = """
    list List tuple Tuple Sequence Iterable Iterator Set set
"""
_SEQUENCES = frozenset(_SEQUENCES_NAMES.split())
_INT = ("LongTensor", "IntTensor", "ByteTensor")
_FLOAT = ("FloatTensor", "HalfTensor", "DoubleTensor", "BFloat16Tensor", "Tensor", "Parameter")
_DICTS = frozenset(("dict", "Dict", "Mapping", "MutableMapping"))
Dotted = Callable[[ast.AST], str | None]


def annotated(node: ast.AST | None, dotted: Dotted) -> Kind:
    """The kind that an annotation names; unknown for what may be a tensor or something else.

    `dotted` gives the full name of an imported object.
    """
    options = [_one(part, dotted) for part in _options(node, dotted)]
    options = [one for one in options if one is not None]
    kinds = set(options)
    return kinds.pop() or UNKNOWN if len(kinds) == 1 else UNKNOWN


def _options(node: ast.AST | None, dotted: Dotted) -> list[ast.AST]:
    """The members of a union."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value, mode="eval").body
        except (SyntaxError, ValueError):
            return []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _options(node.left, dotted) + _options(node.right, dotted)
    if isinstance(node, ast.Subscript):
        name = _name(node.value)
        if name == "Optional":
            return _options(node.slice, dotted)
        if name == "Union" and isinstance(node.slice, ast.Tuple):
            return [one for part in node.slice.elts for one in _options(part, dotted)]
    return [node] if node is not None else []


def _one(node: ast.AST, dotted: Dotted) -> Kind | None:
    """The kind of one member; None for `None`."""
    if isinstance(node, ast.Constant):
        return None if node.value is None else UNKNOWN
    if isinstance(node, ast.Subscript):
        return _several(node, dotted)
    name = dotted(node) or _name(node)
    last = name.rpartition(".")[2]
    if name.startswith("torch."):
        return _of_torch(name, last)
    if name.startswith("numpy."):
        return ARRAY if last in ("ndarray", "array") else PLAIN
    if last in _DICTS:
        return mapping({}, UNKNOWN)
    return PLAIN if last in _PLAIN else UNKNOWN


def _of_torch(name: str, last: str) -> Kind:
    if last in _FLOAT:
        return tensor("device" if last == "Parameter" else "", sure=False)
    if last in _INT:
        return tensor("", "int", sure=False)
    if last == "BoolTensor":
        return tensor("", "bool", sure=False)
    if last in ("device", "dtype"):
        return device("") if last == "device" else DTYPE
    if name.startswith("torch.nn."):
        return LAYER if last in ("Linear", "Embedding", "LayerNorm") else UNKNOWN
    return PLAIN if last == "Size" else UNKNOWN


def _several(node: ast.Subscript, dotted: Dotted) -> Kind:
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if _name(node.value) in _DICTS:
        return mapping({}, annotated(inner[-1], dotted))
    if _name(node.value) not in _SEQUENCES:
        return PLAIN if _name(node.value) in ("Callable", "Literal") else UNKNOWN
    kinds = [annotated(one, dotted) for one in inner if not _is_ellipsis(one)]
    if _name(node.value) in ("tuple", "Tuple") and len(kinds) == len(inner):
        return places(kinds)
    return sequence(kinds[0] if len(set(kinds)) == 1 else UNKNOWN)


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
