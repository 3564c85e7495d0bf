"""Places that code reads outside of its modules: names, and attributes of objects and classes."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.capture.code.live import UNKNOWN, content, is_trusted

_TENSOR_TABLES = ("_parameters", "_buffers")


class OuterValue(NamedTuple):
    """A place that holds a value: `UNKNOWN` for none, and writing it empties the place.

    `owner`: the id of what holds the place. `name`: a name, a key or an index. `is_read`: the code reads it
    for sure.
    """

    owner: int
    name: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool] = operator.is_
    is_read: bool = True


def outer_values(table: Any, name: str) -> Iterator[OuterValue]:
    """Yield the places where a name is looked up: in a dict; in an object, a module's tensors, a class."""
    if type(table) is dict:
        yield of_item(table, name)
        return
    own = getattr(table, "__dict__", None)
    tables = [own] if type(own) is dict else []
    if isinstance(table, nn.Module):
        tables += [getattr(table, one) for one in _TENSOR_TABLES]
    if found := next((one for one in tables if name in one), None):
        yield of_item(found, name)
        return
    if tables and not isinstance(table, torch.Tensor):
        yield of_item(tables[0], name)
    for kind in (table if isinstance(table, type) else type(table)).__mro__:
        if name in vars(kind) or not is_trusted(kind):
            yield of_class(kind, name)
        if name in vars(kind):
            return


def of_closure(cell: types.CellType, name: str) -> OuterValue:
    """Return the place of a closed-over name."""
    write = functools.partial(set_attribute, cell, "cell_contents")
    return OuterValue(id(cell), name, functools.partial(content, cell), write)


def of_default(function: types.FunctionType, name: str, value: Any) -> OuterValue:
    """Return the place of a default, which all calls share."""
    return OuterValue(id(function), name, lambda: value, lambda _: None)


def of_class(kind: type, name: str) -> OuterValue:
    """Return the place of a class's own attribute."""
    write = functools.partial(set_attribute, kind, name)
    read = functools.partial(vars(kind).get, name, UNKNOWN)
    return OuterValue(id(kind), name, read, write)


def of_item(names: dict[str, Any], name: str) -> OuterValue:
    """Return the place of a dict's item, such as a global name."""
    read = functools.partial(names.get, name, UNKNOWN)
    return OuterValue(id(names), name, read, functools.partial(set_item, names, name))


def set_attribute(owner: object, name: str, value: Any) -> None:
    """Set an attribute, or delete it for `UNKNOWN`."""
    if value is UNKNOWN:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def set_item(names: dict[str, Any], name: str, value: Any) -> None:
    """Set an item, or delete it for `UNKNOWN`."""
    if value is UNKNOWN:
        names.pop(name, None)
    else:
        names[name] = value
