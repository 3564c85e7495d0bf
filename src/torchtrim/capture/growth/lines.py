"""Which lines make containers longer, seen by looking after each line of Python that runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torchtrim.capture.growth.containers import length
from torchtrim.dispatch.places import Places, line_of, variables_of

_OWN = str(Path(__file__).parents[2])


class Line(NamedTuple):
    """A line of source."""

    path: str
    line: int
    function: str


class Filler(NamedTuple):
    """The line that fills a container, and the user's line that led there; None where it is the user's."""

    place: Line
    caller: Line | None


class Fillers:
    """Watches this thread's lines between `start` and `stop`. `found` is by the container's id."""

    def __init__(self, places: Places) -> None:
        self.found: dict[int, Filler] = {}
        self._places = places
        self._watched: dict[int, Any] = {}
        self._lengths: dict[int, int] = {}
        self._before: tuple[FrameType, int] | None = None
        self._outer: Any = None
        self._traced: list[tuple[FrameType, Any]] = []

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return bool(self._traced)

    def start(self, containers: Mapping[int, Any]) -> None:
        """Watch these until all were filled or `stop` is called."""
        self._watched = dict(containers)
        self._lengths = {number: length(one) for number, one in containers.items()}
        self._before = None
        self._outer = sys.gettrace()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not _is_own(frame.f_code):
                self._traced.append((frame, frame.f_trace))
                frame.f_trace = self._line
                if self._before is None:
                    self._before = (frame, frame.f_lineno)
            frame = frame.f_back
        sys.settrace(self._called)

    def stop(self) -> None:
        """Look a last time, and watch no longer."""
        if self._watched:
            self._look()
        if sys.gettrace() in (self._called, None):
            sys.settrace(self._outer)
        for frame, trace in self._traced:
            frame.f_trace = trace
            variables_of(frame)
        self._traced.clear()
        self._watched.clear()
        self._before = None

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._watched or _is_own(frame.f_code):
            return None
        return self._line(frame, event, argument)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._watched:
            return None
        self._look()
        if event == "return":
            outer = frame.f_back
            while outer is not None and _is_own(outer.f_code):
                outer = outer.f_back
            self._before = (outer, outer.f_lineno) if outer is not None else None
        else:
            self._before = (frame, frame.f_lineno)
        return self._line

    def _look(self) -> None:
        for number, container in list(self._watched.items()):
            now = length(container)
            if now > self._lengths[number] and self._before is not None:
                self.found[number] = self._filler(*self._before)
                del self._watched[number]
            else:
                self._lengths[number] = now

    def _filler(self, frame: FrameType, line: int) -> Filler:
        here = Line(frame.f_code.co_filename, line, frame.f_code.co_qualname)
        if self._places.is_users((frame.f_code, frame.f_lasti)):
            return Filler(here, None)
        library, user = self._places.find(frame.f_back)
        caller = user if user is not None else library
        if caller is None or not self._places.is_users(caller):
            return Filler(here, None)
        return Filler(here, line_at(caller))


def line_at(spot: tuple[CodeType, int]) -> Line:
    """The line of an instruction."""
    return Line(spot[0].co_filename, line_of(spot), spot[0].co_qualname)


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN)
