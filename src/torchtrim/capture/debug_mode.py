"""CUDA's own count of waits: `torch.cuda.set_sync_debug_mode`, which warns of most of them.

It does not see `synchronize()` of the device and of events, nor copies that only the driver makes block;
`dispatch.calls` and `syncs` tell of those.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_WORDS = "synchronizing CUDA operation"


class SyncCounter:
    """How often CUDA has warned. Warnings of other kinds go where they would have gone."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count for a while."""
        cuda: Any = torch.cuda
        before = cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=f".*{_WORDS}")
            shown = warnings.showwarning
            warnings.showwarning = self._counted(shown)
            cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                cuda.set_sync_debug_mode(before)

    def _counted(self, shown: Any) -> Any:
        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            if _WORDS in str(message):
                self.count += 1
            else:
                shown(message, *args, **kwargs)

        return show
