"""Where a host thread was at a moment: the operators, annotations and Python frames around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtrim.records.trace_events import Event, Lane, Trace

_FRAME = re.compile(r"(?P<path>.+?)\((?P<line>\d{1,9})\): (?P<function>.+)", re.DOTALL)
_BACKWARD = "autograd::engine::evaluate_function"
_HOST_ROUNDING_US = 1.0  # Traces write times in whole microseconds, or round them so.
_MOST_TEXT = 512  # Arbitrary; a frame's name is a path, a line and a function.
_DEEPEST = 512  # Arbitrary; half of Python's own limit of 1,000 frames.
_INSTALLED = ("site-packages/", "dist-packages/")
_PLUMBING = frozenset(
    ("asyncio", "concurrent", "contextlib", "functools", "importlib", "multiprocessing", "queue")
) | {"runpy", "selectors", "threading", "unittest"}


class Frame(NamedTuple):
    """A Python frame. `line` is of the call if `exact`, else of the function's definition."""

    path: str
    line: int
    function: str
    exact: bool

    @property
    def is_torch(self) -> bool:
        """Whether it is PyTorch's own, or Python's plumbing around it."""
        path = self.path.replace("\\", "/")
        inside = "/" + path
        for installed in _INSTALLED:
            _, found, rest = inside.rpartition("/" + installed)
            inside = "/" + rest if found else inside
        first = inside.lstrip("/").split("/")[0] if inside[1:2] != "/" else ""
        return (
            inside.startswith(("/torch/", "/triton/"))
            or first.removesuffix(".py") in _PLUMBING
            or path.startswith(("<frozen", "<string", "<built-in"))
        )

    @property
    def is_installed(self) -> bool:
        """Whether it is in a folder of installed packages."""
        return any(part in self.path.replace("\\", "/") for part in _INSTALLED)

    @property
    def is_profiler(self) -> bool:
        """Whether it is the profiler itself."""
        path = "/" + self.path.replace("\\", "/")
        return "/torch/profiler/" in path or path.endswith("/torch/autograd/profiler.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallMoment:
    """A host thread at one call: what was open, outermost first."""

    operators: tuple[Event, ...]
    frames: tuple[Event, ...]

    @property
    def innermost(self) -> Event | None:
        """The innermost operator, annotations aside."""
        return next((op for op in reversed(self.operators) if not is_annotation(op)), None)

    @property
    def backward(self) -> Event | None:
        """The operator of the backward pass that holds the sequence number, if it is in one."""
        return next((op for op in self.operators if is_backward(op)), None)


def is_annotation(operator: Event) -> bool:
    """Whether it is a `record_function` range rather than an operator."""
    return "::" not in operator.name and not operator.name.endswith(("Backward", "Backward0"))


def is_backward(operator: Event) -> bool:
    """Whether it is an operator of the backward pass that knows its forward operator's number."""
    args = operator.args
    if args is None or args.sequence is None:
        return False
    return operator.name.startswith(_BACKWARD) or (
        args.forward_thread not in (None, 0) and "Backward" in operator.name
    )


def lane_of(event: Event) -> Lane:
    """Process and thread."""
    return (str(event.pid), str(event.tid))


def moments(trace: Trace, calls: Iterable[Event]) -> list[CallMoment]:
    """What was open around each call, in the order given."""
    wanted: dict[Lane, list[tuple[float, int, Event]]] = {}
    for number, call in enumerate(calls):
        wanted.setdefault(lane_of(call), []).append((call.ts, number, call))
    opened: dict[Lane, list[Event]] = {lane: [] for lane in wanted}
    for events in (trace.annotations, trace.operators, trace.frames):
        for event in events:
            here = opened.get((str(event.pid), str(event.tid)))
            if here is not None:
                here.append(event)
    frames = {id(frame) for frame in trace.frames} if trace.frames else set()
    found: dict[int, CallMoment] = {}
    for lane, asked in wanted.items():
        opened[lane].sort(key=lambda event: (event.ts, -event.dur))
        _sweep(opened[lane], sorted(asked, key=lambda a: a[:2]), frames, found)
    return [found[number] for number in range(len(found))]


def _sweep(
    events: list[Event],
    asked: list[tuple[float, int, Event]],
    frames: set[int],
    found: dict[int, CallMoment],
) -> None:
    stack: list[Event] = []
    at, count = 0, len(events)
    for time, number, call in asked:
        while at < count and events[at].ts <= time:
            event = events[at]
            while stack and stack[-1].ts + stack[-1].dur < event.ts:
                stack.pop()
            stack.append(event)
            at += 1
        end = call.end - _HOST_ROUNDING_US
        around = [e for e in stack[-_DEEPEST:] if e.ts + e.dur >= end and e.ts + e.dur >= time]
        found[number] = CallMoment(
            operators=tuple(e for e in around if id(e) not in frames),
            frames=tuple(e for e in around if id(e) in frames),
        )


def parse_frame(name: str, *, exact: bool) -> Frame | None:
    """`path(line): function`, or None for what is no frame in a file."""
    match = _FRAME.fullmatch(name[:_MOST_TEXT])
    if match is None:
        return None
    return Frame(match["path"], int(match["line"]), match["function"], exact)


def frames_of(moment: CallMoment) -> list[Frame]:
    """The frames of files around a moment, innermost first.

    Newer traces have an event for each frame, which tells the line of the function's definition; older
    ones a `Call stack` on the operator, which tells the line of the call.
    """
    found = [parse_frame(frame.name, exact=False) for frame in reversed(moment.frames)]
    if not any(found):
        stacks = (op.args.stack for op in reversed(moment.operators) if op.args and op.args.stack)
        found = [parse_frame(one, exact=True) for one in next(stacks, "").split(";")]
    return [frame for frame in found if frame is not None]


def place_of(
    frames: Sequence[Frame], is_users: Callable[[str], bool] = lambda _: False
) -> Frame | None:
    """The frame to name, of frames with the innermost first.

    The innermost of a file that `is_users`, else outside PyTorch and installed packages, else outside
    PyTorch. Newer traces leave out the folder of installed packages, so without `is_users` that may be a
    library's.
    """
    own = [frame for frame in frames if not frame.is_torch]
    users = next((frame for frame in own if is_users(frame.path)), None)
    return users or next(
        (frame for frame in own if not frame.is_installed), own[0] if own else None
    )
