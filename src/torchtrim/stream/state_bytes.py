"""What an object holds alive: its tensors, through attributes and containers, each storage once."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torchtrim.stream.storages import held_bytes

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


def tensors_in(state: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor that an object holds, with the path to it: attribute names, keys, positions.

    Goes through dicts, lists, tuples and the attributes of objects, each once. Modules are not entered,
    except `state` itself: its parameters, buffers and submodules are left out, its other attributes not.
    """
    seen: set[int] = set()
    yield from _walk(state, (), seen, top=True)


def state_bytes(state: Any) -> int:
    """Bytes of the storages that an object holds alive, each once, as `tensors_in` finds them."""
    return held_bytes(tensor for _, tensor in tensors_in(state))


def _walk(
    value: Any, path: tuple[Any, ...], seen: set[int], *, top: bool = False
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, _LEAVES) or (callable(value) and not isinstance(value, nn.Module)):
        return
    if id(value) in seen or (isinstance(value, nn.Module) and not top):
        return
    seen.add(id(value))
    for name, one in _parts(value):
        yield from _walk(one, (*path, name), seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(list(value))
    else:
        hidden = {"_parameters", "_buffers", "_modules"} if isinstance(value, nn.Module) else set()
        for name, one in list(getattr(value, "__dict__", {}).items()):
            if name not in hidden:
                yield name, one
