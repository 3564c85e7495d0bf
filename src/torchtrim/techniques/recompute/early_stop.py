"""Whether a block that runs again may stop where nothing more is wanted of it.

`torch.utils.checkpoint` stops it by an exception, which it raises in the hook that packs the last tensor and
which passes through the block's own frames. A handler of the block's would see it: `except Exception` would
swallow it or raise another, and so may the context manager of a `with`. So the frames are looked at when that
moment comes, and where a handler is in the way the block runs to its end.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

_PUSH = dis.opmap["PUSH_EXC_INFO"]
_LETS_PASS = ("torch", "torchtrim")
"""Packages whose code lets the exception pass."""
_Region = tuple[int, int]
_handled: dict[int, tuple[CodeType, Sequence[_Region]]] = {}


def _nothing() -> None: ...


class EarlyStop:
    """What is given to `checkpoint` as `early_stop`: whether to stop, told each time it asks.

    It asks in its hook, once for each tensor that the block saves when it runs again. What it counts there
    tells which is the last; where that cannot be read, the block runs to its end.
    """

    def __init__(self, outermost: CodeType, owner: object) -> None:
        self._outermost = outermost
        self._owner = weakref.ref(owner)
        self._asking: tuple[Callable[[], Any], Any] | None = None

    def begin(self) -> None:
        """The block is about to run again."""
        self._asking = None

    def __bool__(self) -> bool:
        hook = sys._getframe(1)
        if self._asking is None:
            found = hook.f_locals
            self._asking = found.get("target_frame_ref", _nothing), found.get("gid")
        target_of, gid = self._asking
        target = target_of()
        try:
            left = len(target.weak_holders) - target.recomp_counter[gid]
        except (AttributeError, KeyError, TypeError):
            return False
        return left > 0 or (left == 0 and self._is_free(hook.f_back))

    def _is_free(self, frame: FrameType | None) -> bool:
        """Whether no handler is between a frame and the one that began to run the block again."""
        while frame is not None:
            code = frame.f_code
            if code is self._outermost:
                if frame.f_locals.get("self") is self._owner():
                    return True
            elif any(first <= frame.f_lasti < last for first, last in _handlers(frame)):
                return False
            frame = frame.f_back
        return False


def _handlers(frame: FrameType) -> Sequence[_Region]:
    """The instructions of a function, from and to, that an `except`, a `finally` or a `with` covers."""
    code = frame.f_code
    known = _handled.get(id(code))
    if known is None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        regions = () if package in _LETS_PASS else _regions(code)
        known = _handled[id(code)] = code, regions
    return known[1]


def _regions(code: CodeType) -> Sequence[_Region]:
    """What the compiler covers for itself, as around a comprehension, begins otherwise than a handler."""
    entries: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return tuple((e.start, e.end) for e in entries if code.co_code[e.target] == _PUSH)
