"""What modules keep beside parameters and buffers: plain attributes, containers, generators of their own."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

_WHERE = {"inplace", "gradient_as_bucket_view"}
_OWN = frozenset(vars(nn.Module())) - {"training"} | _WHERE
_PLAIN = (bool, int, str, bytes, complex, type(None))
_MOST = 1000
_DEEPEST = 4


def attributes(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """`(name, value)` of what a module was given: a tensor, or a text in place of all else.

    A float is a tensor of float64, since it may be rounded. Of what nobody knows only the type counts, and
    what says where a result is, such as `inplace`, does not say what it is.
    """
    for path, module in modules:
        for name, value in list(vars(module).items()):
            if name not in _OWN and not callable(value):
                yield from _values(f"{path}.{name}", value)


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    tensors: list[torch.Tensor] = []
    text = _described(value, tensors, _DEEPEST)
    yield name, hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    for number, tensor in enumerate(tensors):
        yield f"{name}.{number}", tensor


def _described(value: Any, tensors: list[torch.Tensor], deep: int) -> str:
    """A text of the value in which tensors and floats have only their place; those are in the list."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, float):
        tensors.append(torch.tensor(value, dtype=torch.float64))
        return "float"
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor"
    if isinstance(value, dict) and deep:
        parts = (
            f"{_key(key)}: {_described(one, tensors, deep - 1)}"
            for key, one in _some(value.items())
        )
        return f"dict {len(value)} {{{', '.join(parts)}}}"
    if isinstance(value, list | tuple | deque) and deep:
        parts = (_described(one, tensors, deep - 1) for one in _some(value))
        return f"{type(value).__name__} {len(value)} [{', '.join(parts)}]"
    if isinstance(value, set | frozenset):
        return f"set {len(value)} {sorted(repr(one) for one in value if isinstance(one, _PLAIN))}"
    return _generator(value)


def _key(key: Any) -> str:
    """A key by its value; by its type where that might be an address."""
    return f"{key!r:.80}" if isinstance(key, (*_PLAIN, float)) else type(key).__qualname__


def _some(values: Iterable[Any]) -> Iterator[Any]:
    for number, value in enumerate(values):
        if number == _MOST:
            return
        yield value


def _generator(value: Any) -> str:
    """The state of a generator of random numbers, or an array's bytes; else the type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Generator):
        return f"{kind} {value.get_state().tolist()}"
    if isinstance(value, random.Random):
        return f"{kind} {value.getstate()}"
    if kind == "numpy.ndarray":
        return f"{kind} {value.dtype} {value.shape} {value.tobytes().hex() if value.dtype != object else ''}"
    if kind.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return f"{kind} {value.bit_generator.state}"
    return kind
