"""Processes that a script starts by itself: what they do is not seen here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_HELPERS = ("multiprocessing.", "concurrent.", "torch.utils.data", "torch._inductor")
"""Modules whose processes read data or serve; none of them trains."""


class OwnProcesses:
    """Counts them from `install` on, without the workers of loaders and of pools. `remove` stops that."""

    def __init__(self) -> None:
        self.started = 0
        self.remove: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Count them."""
        original: Any = BaseProcess.start

        @functools.wraps(original)
        def start(process: BaseProcess) -> None:
            target = getattr(process, "_target", None)
            home = str(getattr(target, "__module__", type(process).__module__)) + "."
            self.started += not home.startswith(_HELPERS)
            original(process)

        def remove() -> None:
            BaseProcess.start = original  # type: ignore[method-assign]

        counting: Any = start
        BaseProcess.start = counting  # type: ignore[method-assign]
        self.remove = remove
