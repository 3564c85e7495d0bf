"""Values that code reads outside of its modules: names, attributes of objects, items of small containers."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from torchtrim.capture.code.live import UNKNOWN, content

_MOST = 64
"""Items of a container that is copied at each call."""
_NESTED = 3
_TENSOR_TABLES = ("_parameters", "_buffers")


class OuterValue(NamedTuple):
    """A place that holds a value. `owner`: the id of what holds the place."""

    owner: int
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    same: Callable[[Any, Any], bool] = operator.is_


def outer_value(table: Any, name: str) -> OuterValue | None:
    """Return the place of a name: in a dict, an object, its class, or a module's tensors."""
    if type(table) is dict:
        return _in_dict(table, name)
    tables = [getattr(table, "__dict__", None)]
    if isinstance(table, nn.Module):
        tables += [getattr(table, one) for one in _TENSOR_TABLES]
    for one in tables:
        if type(one) is dict and name in one:
            return _in_dict(one, name)
    kinds = table.__mro__ if isinstance(table, type) else type(table).__mro__
    kind = next((kind for kind in kinds if name in vars(kind)), None)
    if kind is None:
        return None
    read = functools.partial(lambda kind: vars(kind).get(name, UNKNOWN), kind)
    return OuterValue(id(kind), name, read, functools.partial(setattr, kind, name))


def of_closure(cell: types.CellType, name: str) -> OuterValue:
    """Return the place of a closed-over name."""
    write = functools.partial(setattr, cell, "cell_contents")
    return OuterValue(id(cell), name, functools.partial(content, cell), write)


def of_container(container: Any, name: str, depth: int = _NESTED) -> Iterator[OuterValue]:
    """Yield the items of a list, deque or dict, and those of containers in it."""
    if not depth or type(container) not in _COPIES or len(container) > _MOST:
        return
    read = functools.partial(_COPIES[type(container)], container)
    write = functools.partial(_fill, container)
    yield OuterValue(id(container), name, read, write, _same_items)
    for inner in container.values() if isinstance(container, dict) else container:
        yield from of_container(inner, name, depth - 1)


_COPIES: dict[type, Callable[[Any], Any]] = {list: list, dict: dict, collections.deque: list}


def _in_dict(names: dict[str, Any], name: str) -> OuterValue:
    read = functools.partial(names.get, name, UNKNOWN)
    return OuterValue(id(names), name, read, functools.partial(names.__setitem__, name))


def _fill(container: Any, items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(items)


def _same_items(then: Any, now: Any) -> bool:
    if len(then) != len(now):
        return False
    if isinstance(then, dict):
        return [*then] == [*now] and all(map(operator.is_, then.values(), now.values()))
    return all(map(operator.is_, then, now))
