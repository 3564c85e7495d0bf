"""Names of a joint graph and its nodes by their computation, which hold in other processes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

_FLOATS = re.compile(r"torch\.(bfloat16|float16|float32|float64)")
_CASTS = {torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default}
Names = dict[fx.Node, str]


def keys_of(graph: fx.Graph) -> Names:
    """Return a name for each node that depends on what it computes, not on names: its operator and inputs.

    Nodes that compute the same have the same inputs and operator; their order tells them apart.
    """
    keys: Names = {}
    seen: dict[str, int] = {}
    for number, node in enumerate(graph.nodes):
        text = _text(node, number, keys)
        same = seen[text] = seen.get(text, -1) + 1
        keys[node] = _digest(f"{text} {same}")
    return keys


def double_keys_of(graph: fx.Graph) -> Names:
    """Return names that do not depend on the precision of floats: a certificate runs a plan in float64 too.

    There autocast casts nothing, so a cast has its operand's name. Without casts, nodes that compute
    the same in two precisions are one node, so nodes that compute the same have one name.
    """
    keys: Names = {}
    for number, node in enumerate(graph.nodes):
        text = _FLOATS.sub("float", _text(node, number, keys))
        keys[node] = keys[node.all_input_nodes[0]] if _is_cast(node) else _digest(text)
    return keys


def key_of(keys: Names) -> str:
    """Return the name of a graph: of all its nodes."""
    return _digest("".join(keys.values()))


def double_key_of(keys: Names) -> str:
    """Return a graph's name that does not depend on the precision of floats."""
    return _digest("".join(sorted({*keys.values()})))


def is_double(graph: fx.Graph) -> bool:
    """Return True if all inputs of floats are in float64."""
    inputs = graph.find_nodes(op="placeholder")
    kinds = {value.dtype for node in inputs for value in _floats(node)}
    return kinds == {torch.float64}


class _Key(str):
    __repr__ = str.__str__


def _text(node: fx.Node, number: int, keys: Names) -> str:
    if node.op in ("placeholder", "get_attr"):
        return f"{node.op} {number} {_kind(node)}"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: _Key(keys[each]))
    return f"{node.op} {node.target} {args} {kwargs} {_kind(node)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kind(node: fx.Node) -> str:
    return " ".join(f"{one.dtype}{[str(size) for size in one.shape]}" for one in _tensors(node))


def _is_cast(node: fx.Node) -> bool:
    return node.target in _CASTS and bool(_floats(node) and _floats(node.all_input_nodes[0]))


def _floats(node: fx.Node) -> list[torch.Tensor]:
    return [value for value in _tensors(node) if value.is_floating_point()]


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    values: Any = node.meta.get("val")
    every: Iterable[Any] = values if isinstance(values, (tuple, list)) else (values,)
    return (one for one in every if isinstance(one, torch.Tensor))
