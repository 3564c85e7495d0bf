"""`x[...]` read and written: which forms of it wait."""

from __future__ import annotations

import ast
from collections.abc import Callable

from torchtrim.linter.kinds import UNKNOWN, Kind, part_of, sequence, tensor
from torchtrim.syncs.lookup import is_from

Wait = Callable[[str, ast.AST], None]
Places = list[tuple[ast.expr, Kind]]


def is_mask(place: ast.expr, kind: Kind, base: Kind) -> bool:
    """Whether it is a boolean tensor that may lie on a device.

    One whose type is not known is, by its name: numbers of places are not called a mask.
    """
    if kind.single or not (kind.waits or (kind.what == "unknown" and base.what == "tensor")):
        return False
    return kind.dtype == "bool" or (not kind.dtype and _is_named_mask(place))


def _is_named_mask(place: ast.expr) -> bool:
    if isinstance(place, ast.Call) and len(place.args) == 1:
        return _last(place.func) in ("cat", "concat") and _is_named_mask(place.args[0])
    return _last(place).endswith(("mask", "masks"))


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def read(node: ast.Subscript, base: Kind, places: Places, wait: Wait) -> Kind:
    """What `base[places]` gives. `places` are the expressions within the brackets."""
    if base.what in ("plain", "array"):
        return base
    masks = sum(is_mask(place, kind, base) for place, kind in places)
    if masks and base.what in ("tensor", "unknown") and base.on in ("", "device"):
        wait("mask-index", node)
        return tensor(base.on, base.dtype)
    if base.what == "sequence":
        return _of_sequence(node, base, places, wait)
    if base.what != "tensor":
        return UNKNOWN
    _bounds(places, wait)
    if _from_host(base, places):
        wait("host-index", node)
    return tensor(base.on, base.dtype)


def written(node: ast.Subscript, base: Kind, places: Places, value: Kind, wait: Wait) -> None:
    """`base[places] = value`."""
    if base.what not in ("tensor", "unknown") or base.on in ("host", "mixed"):
        return
    masks = sum(is_mask(place, kind, base) for place, kind in places)
    if masks and (value.waits or masks > 1):
        wait("mask-assign", node)
    elif base.what == "tensor" and not masks:
        _bounds(places, wait)
        if _from_host(base, places):
            wait("host-index-assign", node)
        elif value.what == "plain" and _is_moved(places):
            wait("assigned-number", node)


def _is_moved(places: Places) -> bool:
    """Whether a number is moved to the device to be assigned there; from torch 2.15 on it is made there."""
    return any(_is_index(kind) for _, kind in places) and not is_from("2.15")


def _of_sequence(node: ast.Subscript, base: Kind, places: Places, wait: Wait) -> Kind:
    if any(isinstance(place, ast.Slice) for place, _ in places):
        return sequence(part_of(base)) if base.items else base
    if len(places) == 1 and places[0][1].waits and places[0][1].sure:
        wait("item", node)
    at = places[0][0].value if len(places) == 1 and isinstance(places[0][0], ast.Constant) else ""
    return dict(base.items).get(str(at), part_of(base))


def _bounds(places: Places, wait: Wait) -> None:
    """`x[:t]` reads a tensor as a number."""
    for place, kind in places:
        bounded = isinstance(place, ast.Slice) and kind.what == "sequence" and part_of(kind).waits
        if bounded or (kind.waits and kind.single and kind.dtype == "int" and kind.sure):
            wait("item", place)


def _from_host(base: Kind, places: Places) -> bool:
    """Whether a list or a tensor of the host tells the places in a tensor that is on the device."""
    if not base.waits:
        return False
    for place, kind in places:
        listed = isinstance(place, ast.List) and kind == sequence(part_of(kind))
        if listed and place.elts and part_of(kind).what == "plain":  # type: ignore[attr-defined]
            return True
        if kind.what == "tensor" and kind.on == "host" and not kind.single and base.on == "device":
            return kind.dtype != "bool"
    return False


def _is_index(kind: Kind) -> bool:
    return kind.waits and kind.dtype == "int" and not kind.single
