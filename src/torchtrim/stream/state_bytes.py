"""What an object holds alive: its tensors, through attributes and containers, each storage once."""

from __future__ import annotations

from typing import Any

from torchtrim.stream.paths import tensors_in
from torchtrim.stream.storages import held_bytes


def state_bytes(state: Any) -> int:
    """Bytes of the storages that an object holds alive, each once.

    Goes through dicts, lists, tuples and the attributes of objects; parameters, buffers and submodules of
    modules are left out.
    """
    return held_bytes(tensor for _, tensor in tensors_in(state))
