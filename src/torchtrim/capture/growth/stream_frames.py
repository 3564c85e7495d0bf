"""Detects the frames of a stream: calls of one module, or of one function."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

_PATIENCE = 32
"""Calls. Arbitrary: an encoder may run several times before each frame."""


class StreamFrames:
    """A detector of the calls that end a frame.

    Default: calls of the first root, or of another root once the first has been idle for `_PATIENCE` calls.
    With a name: calls of modules of that class, or of that Python function, such as `Tracker.step`.
    """

    def __init__(self, name: str | None) -> None:
        self.calls: Counter[str] = Counter()
        self._name = name
        self._root: nn.Module | None = None
        self._others = 0
        self._outer: Any = None

    @property
    def what(self) -> str:
        """Description of a frame."""
        if self._name is not None:
            return f"a call of {self._name}"
        return f"a call of {type(self._root).__name__}" if self._root is not None else ""

    def ends(self, module: nn.Module, depth: int) -> bool:
        """Return True if this call ends a frame."""
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
        """Call `ended` with each result of the function of that name."""
        self._outer, name = sys.getprofile(), self._name

        def returned(frame: FrameType, event: str, result: Any) -> None:
            if event == "return" and frame.f_code.co_qualname == name:
                self.calls[name] += 1
                ended(result)

        if name is not None:
            sys.setprofile(returned)

    def stop(self) -> None:
        """Stop listening."""
        if self._name is not None:
            sys.setprofile(self._outer)


def trackers_of(part: nn.Module) -> list[nn.Module]:
    """Return the video predictors that hold this module, such as `sam2`'s. Programs call only their
    submodules."""
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), nn.Module)
        and hasattr(type(thing), "propagate_in_video")
        and thing is not part
        and any(module is part for module in thing.modules())
    ]
