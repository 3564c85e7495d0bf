"""What a frame of a stream is: a call of one module, or of one function."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

_PATIENCE = 32


class StreamFrames:
    """Told of calls, it says which of them end a frame.

    Without a name these are the calls of the root that was called first; of another, once that has not been
    called for so many calls of others. With a name they are the calls of modules of that class, anywhere,
    or of the Python function of that name, such as `step` or `Tracker.step`.
    """

    def __init__(self, name: str | None) -> None:
        self.calls: Counter[str] = Counter()
        self._name = name
        self._root: nn.Module | None = None
        self._others = 0
        self._outer: Any = None

    @property
    def what(self) -> str:
        """A frame, in words."""
        if self._name is not None:
            return f"a call of {self._name}"
        return f"a call of {type(self._root).__name__}" if self._root is not None else ""

    def ends(self, module: nn.Module, depth: int) -> bool:
        """Whether a frame ends with this call."""
        kind = type(module).__name__
        if depth == 0:
            self.calls[kind] += 1
        if self._name is not None:
            return kind == self._name and depth >= 0
        if depth != 0:
            return False
        if self._root is None or self._others >= _PATIENCE:
            self._root, self._others = module, 0
        if module is self._root:
            self._others = 0
            return True
        self._others += 1
        return False

    def listen(self, ended: Callable[[Any], None]) -> None:
        """Tell of returns of the function of that name, with what it returned."""
        if self._name is None:
            return
        name, self._outer = self._name, sys.getprofile()

        def returned(frame: FrameType, event: str, result: Any) -> None:
            if event == "return" and frame.f_code.co_qualname == name:
                self.calls[name] += 1
                ended(result)

        sys.setprofile(returned)

    def stop(self) -> None:
        """Listen no longer."""
        if self._name is not None:
            sys.setprofile(self._outer)
