"""Reads module state beside parameters and buffers: attributes, containers, random generators."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.evidence.generators import state_of

_WHERE = {"inplace", "gradient_as_bucket_view"}
_EXCHANGED_NAMES = """
    reducer logger static_graph bucket_bytes_cap bucket_bytes_cap_default bucket_bytes_cap_list _bucket_config
    _comm_hooks _has_rebuilt_buckets _static_graph_delay_allreduce_enqueued
"""
_EXCHANGED = frozenset(_EXCHANGED_NAMES.split())
_REPLICAS = "torch.nn.parallel.distributed"
_OWN = frozenset(vars(nn.Module())) - {"training"} | _WHERE
_OF_SHARDS = ("__composable_api", "_is_fsdp", "_fsdp")
_PLAIN = (bool, int, str, bytes, complex, type(None))
_MOST = 1000
_DEEPEST = 4
_MOST_PARTS = 20_000
"""Entries, depth and parts of a value. Arbitrary: bounds that keep a step's evidence cheap."""

_LARGEST_ARRAY = 1 << 26  # bytes of a numpy array to hash; larger ones compare by type and shape
Opened = Callable[[Any], dict[str, Any] | None]


def attributes(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """Yield `(name, value)` of modules' attributes: tensors, and a digest of everything else.

    A float becomes a float64 tensor, since it may be rounded. Unknown values compare by type. Flags that do
    not change results, such as `inplace`, and settings of gradient exchange are ignored.
    """
    for path, module in modules:
        replica = any(kind.__module__ == _REPLICAS for kind in type(module).__mro__)
        own = _OWN | _EXCHANGED if replica else _OWN
        for name, value in list(vars(module).items()):
            if name not in own and not callable(value) and not name.startswith(_OF_SHARDS):
                digest, tensors, _ = described(value)
                yield f"{path}.{name}", digest
                for number, tensor in enumerate(tensors):
                    yield f"{path}.{name}.{number}", tensor


class Described(NamedTuple):
    """A digest of a value, with placeholders for its tensors and floats, and the tensors themselves.

    `is_plain`: it holds only containers, tensors, numbers and strings.
    """

    digest: str
    tensors: list[torch.Tensor]
    is_plain: bool


def described(value: Any, opened: Opened = lambda _: None) -> Described:
    """Describe a value. `opened` returns an object's attributes, or None to compare it by type."""
    writer = _Description(opened)
    text = writer.of(value, _DEEPEST).encode()
    digest = hashlib.blake2b(text, digest_size=12).hexdigest()
    return Described(digest, writer.tensors, writer.is_plain)


class _Description:
    """A writer of a text for a value, with placeholders for tensors and floats, which it collects."""

    def __init__(self, opened: Opened) -> None:
        self.tensors: list[torch.Tensor] = []
        self.is_plain = True
        self._opened = opened
        self._left = _MOST_PARTS

    def of(self, value: Any, deep: int) -> str:
        self._left -= 1
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, float):
            self.tensors.append(torch.tensor(value, dtype=torch.float64, device="cpu"))
            return "float"
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return "tensor"
        if isinstance(value, dict) and deep:
            return f"dict {len(value)} {{{self._pairs(value, deep)}}}"
        if isinstance(value, list | tuple | deque) and deep:
            parts = (self.of(one, deep - 1) for one in self._some(value))
            return f"{type(value).__name__} {len(value)} [{', '.join(parts)}]"
        if isinstance(value, set | frozenset):
            plain = sorted(repr(one) for one in value if isinstance(one, _PLAIN))
            return f"set {len(value)} {plain}"
        self.is_plain = False
        if deep and (inside := self._opened(value)) is not None:
            return f"{type(value).__qualname__} {{{self._pairs(inside, deep)}}}"
        return _generator(value)

    def _pairs(self, value: dict[Any, Any], deep: int) -> str:
        pairs = self._some(list(value.items()))
        return ", ".join(f"{_key(key)}: {self.of(one, deep - 1)}" for key, one in pairs)

    def _some(self, values: Iterable[Any]) -> Iterator[Any]:
        for number, value in enumerate(values):
            if number == _MOST or self._left <= 0:
                return
            yield value


def _key(key: Any) -> str:
    return f"{key!r:.80}" if isinstance(key, (*_PLAIN, float)) else type(key).__qualname__


def _generator(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if (state := state_of(value)) is not None:
        return f"{kind} {state}"
    if kind == "numpy.ndarray":
        is_read = value.dtype != object and value.nbytes <= _LARGEST_ARRAY
        data = hashlib.sha256(value.tobytes()).hexdigest() if is_read else ""
        return f"{kind} {value.dtype} {value.shape} {data}"
    return kind
