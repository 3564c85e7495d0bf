"""Edits of a joint graph that let backward free memory sooner. They depend on the graph alone.

A convolution's gradients, which torch computes in one kernel, hold the saved input, the incoming gradient and
the gradient of the input at once. Here they are two kernels: one for the weight and the bias, and one for the
input, as the transposed convolution, which does not read the saved input. Libraries compute them apart
anyway: no bit differed for 26 shapes.

A slice is no memory of its own, so a gradient of which a slice is read late is held until then, and Inductor,
which fuses the sum of several, holds each of them. Such a slice is copied.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

_BACKWARD = torch.ops.aten.convolution_backward.default
SLICES: dict[Any, Any] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_copy.Tensor,
    torch.ops.aten.select.int: torch.ops.aten.select_copy.int,
}
"""Views, and the kernels that copy them: Inductor would fuse a loop with its late reader."""


def can_free_sooner(graph: fx.Graph) -> bool:
    """Return True if there is something to edit in a graph."""
    return any(map(_computes_both, graph.nodes)) or any(_late_slices(graph))


def free_sooner(module: fx.GraphModule) -> None:
    """Split each convolution's gradients, and copy slices that are read late."""
    both = [node for node in module.graph.nodes if _computes_both(node)]
    for node in both:
        _split(node)
    for node in both:
        _compute_late(node)
    for node in both:
        _transpose(node)
    for late in [*_late_slices(module.graph)]:
        late.target = SLICES[late.target]
        late.meta["val"] = late.meta["val"].clone()
    module.graph.lint()
    module.recompile()


def _computes_both(node: fx.Node) -> bool:
    if node.target is not _BACKWARD:
        return False
    of_input, *of_weights = _arguments(node)[-1]
    read = any(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return bool(of_input and any(of_weights) and read)


def _split(node: fx.Node) -> None:
    """Leave the gradient of the input to a node, and compute the others before it."""
    *others, (_, *of_weights) = _arguments(node)
    value = node.meta["val"]
    with node.graph.inserting_before(node):
        weights = node.graph.call_function(_BACKWARD, (*others, [False, *of_weights]))
    weights.meta = {**node.meta, "val": (None, *value[1:])}
    node.args, node.meta["val"] = (*others, [True, False, False]), (value[0], None, None)
    for result in [*node.users]:
        if result.args[1]:
            result.args = weights, result.args[1]


def _compute_late(node: fx.Node) -> None:
    """Compute a gradient that is larger than the one it is computed from when it is read.

    What may read the same saved input computes it before the next one's, so that all free it together.
    """
    (result,) = node.users
    if not _grows(node) or not result.users:
        return
    order = {each: at for at, each in enumerate(node.graph.nodes)}
    same = _arguments(node)[1].users
    others = (user for user in same if user.target is _BACKWARD and _arguments(user)[-1][0])
    later = [each for each in (*result.users, *others) if order[each] > order[result]]
    first = min(later, key=order.__getitem__)
    first.prepend(node)
    first.prepend(result)


def _arguments(node: fx.Node) -> Any:
    return node.args


def _grows(node: fx.Node) -> bool:
    _, _, weight, _, stride, _, _, transposed, _, groups, _ = _arguments(node)
    outer, inner = weight.meta["val"].shape[:2]
    if transposed:
        return bool(outer > inner * groups * math.prod(stride))
    return bool(inner * groups * math.prod(stride) > outer)


def _transpose(node: fx.Node) -> None:
    """Compute the gradient of an input without that input, if the kernel is larger than one element.

    Else it is a product, which takes longer as a transposed convolution.
    """
    gradient, _, weight, _, *settings, transposed, _, groups, _ = _arguments(node)
    kernel = weight.meta["val"].shape[2:]
    missing = [0] * len(kernel) if transposed else _missing(node)
    if missing is None or all(size == 1 for size in (*kernel, *settings[0])):
        return
    (result,) = node.users
    with node.graph.inserting_before(node):
        other = node.graph.call_function(
            torch.ops.aten.convolution.default,
            (gradient, weight, None, *settings, not transposed, missing, groups),
        )
    other.meta = result.meta
    result.replace_all_uses_with(other)
    node.graph.erase_node(result)
    node.graph.erase_node(node)


def _missing(node: fx.Node) -> list[int] | None:
    """Return what strides have left out at the end of each side; None if it depends on symbolic sizes."""
    gradient, read, weight, _, *settings = _arguments(node)
    shapes = (value.meta["val"].shape[2:] for value in (read, gradient, weight))
    found = []
    for before, after, size, stride, padding, dilation in zip(*shapes, *settings[:3], strict=True):
        reached = (after - 1) * stride - 2 * padding + dilation * (size - 1) + 1
        if stride > 1 and not (isinstance(before, int) and isinstance(after, int)):
            return None
        found.append(before - reached if stride > 1 else 0)
    return found


def _late_slices(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield slices that are first read when products were computed since others of the same gradient were."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    products = [order[node] for node in order if _is_product(node)]

    def begins(node: fx.Node) -> int:
        return bisect(products, min(map(order.__getitem__, node.users), default=0))

    for node in _of_backward(graph):
        if len(node.users) > 1 and all(user.target in SLICES for user in node.users):
            soon = min(map(begins, node.users))
            yield from (each for each in node.users if begins(each) > soon)


def _of_backward(graph: fx.Graph) -> list[fx.Node]:
    """Return what is computed from the incoming gradients."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        given = node.op == "placeholder" and "tangents" in node.name
        if given or any(one in found for one in node.all_input_nodes):
            found[node] = None
    return [*found]


def _is_product(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in flop_registry
