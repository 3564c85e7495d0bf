"""Workspaces that PyTorch keeps for cuBLAS: one for each handle and stream, from its first product on.

A handle belongs to a thread, and backward runs in a thread of its own. The caching allocator allocates them,
and they are never freed. Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize (v2.9.0).
"""

from __future__ import annotations

import os
import re
import threading
from typing import Any

import torch
from torch._C import _current_autograd_node

from torchtrim.emulator.streams import current_stream

_KIB = 2**10
_USUAL = 2 * 4096 * _KIB + 8 * 16 * _KIB  # :4096:2:16:8
_HOPPER = 8 * 4096 * _KIB
_CONFIG = re.compile(r":(\d+):(\d+)")

PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"),
        "_addmm_activation",
    )
)
"""Operators that call cuBLAS for floating-point tensors."""


class Workspaces:
    """The workspaces in use. `capability`: of the device, None for one that is not modelled."""

    def __init__(self, capability: tuple[int, int] | None) -> None:
        self._usual = _HOPPER if capability == (9, 0) else _USUAL
        self._known = capability is not None
        self._taken: dict[tuple[int, bool, Any], int] = {}

    @property
    def bytes(self) -> int:
        """The bytes of all."""
        return sum(self._taken.values())

    def product(self, operand: torch.Tensor) -> int:
        """Take one for the running thread's handle and stream, and return its bytes: 0 if it has one."""
        if not self._known or not (operand.is_floating_point() or operand.is_complex()):
            return 0
        engine = _current_autograd_node() is not None
        key = threading.get_ident(), engine, current_stream().stream_id
        if key in self._taken:
            return 0
        self._taken[key] = self._size()
        return self._taken[key]

    def _size(self) -> int:
        """Return the bytes of the next one: `CUBLAS_WORKSPACE_CONFIG` decides if it is set."""
        pairs = _CONFIG.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        return sum(int(size) * int(count) * _KIB for size, count in pairs) or self._usual
