"""Locates a host thread at a moment: the operators, annotations and Python frames around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Literal, NamedTuple

from torchtrim.records.trace import Event, Lane, Trace

Kind = Literal["stream", "event", "device", "copy", "record", "order", "other"]

_PREFIX = re.compile(r"^(?:cuda|hip|cu)(?=[A-Z])")
_SUFFIX = re.compile(r"(?:_ptsz|_ptds|_v\d+|_spt|R\d{4})+$")
_BLOCKING_COPY = re.compile(
    r"^Memcpy(?:2D|3D|Peer|DtoH|HtoD|DtoD|HtoA|AtoH|ToSymbol|FromSymbol|WithStream|ToArray|FromArray)?$"
)
_KINDS: dict[str, Kind] = {
    "StreamSynchronize": "stream",
    "EventSynchronize": "event",
    "DeviceSynchronize": "device",
    "CtxSynchronize": "device",
    "EventRecord": "record",
    "EventRecordWithFlags": "record",
    "StreamWaitEvent": "order",
}
WAITING: frozenset[Kind] = frozenset(("stream", "event", "device", "copy"))


@cache
def kind_of(name: str) -> Kind:
    """Classify a call of the CUDA or HIP runtime by its name.

    `stream`, `event` and `device` synchronize one stream, one event or the whole device. `copy` is a copy
    that returns when it is done (`cudaMemcpy`, `hipMemcpyWithStream`). `record` and `order` are event
    records and waits of a stream for an event. All others are `other`.
    """
    plain = _SUFFIX.sub("", _PREFIX.sub("", name))
    if plain in _KINDS:
        return _KINDS[plain]
    return "copy" if _BLOCKING_COPY.match(plain) else "other"


def is_pageable(activity: str) -> bool:
    """Return True if a copy is from or to pageable host memory, so the host waits for it."""
    return activity.startswith("Memcpy") and "Pageable" in activity


def is_between_devices(activity: str, kind: object = None) -> bool:
    """Return True if a copy stays on devices, so the host does not wait for it.

    `kind` is `args.kind` of the call, which ROCm's tracer writes: `hipMemcpyKind`, 1 to the device, 2 to the
    host, 3 between devices. It is the requested kind; the activity's label may say "DtoD" for all three.
    """
    if str(kind) in ("0", "1", "2", "3"):
        return str(kind) == "3"
    return activity.startswith(("Memcpy DtoD", "Memcpy PtoP"))


_FRAME = re.compile(r"(?P<path>.+?)\((?P<line>\d{1,9})\): (?P<function>.+)", re.DOTALL)
_BACKWARD = "autograd::engine::evaluate_function"
_HOST_ROUNDING_US = 1.0  # Traces write times in whole microseconds, or round them so.
_MOST_TEXT = 512  # Arbitrary; a frame's name is a path, a line and a function.
_DEEPEST = 512  # Arbitrary; half of Python's own limit of 1,000 frames.
_INSTALLED = ("site-packages/", "dist-packages/")
_PLUMBING = frozenset(
    (
        *("asyncio", "concurrent", "contextlib", "functools", "importlib", "multiprocessing"),
        *("queue", "runpy", "selectors", "threading", "unittest"),
    )
)


class Frame(NamedTuple):
    """A Python frame. `line` is the call's if `exact`, else the function definition's."""

    path: str
    line: int
    function: str
    exact: bool

    @property
    def is_torch(self) -> bool:
        """True for a frame of PyTorch, or of Python's plumbing around it."""
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
        """True for a frame in a folder of installed packages."""
        return any(part in self.path.replace("\\", "/") for part in _INSTALLED)

    @property
    def is_profiler(self) -> bool:
        """True for a frame of the profiler."""
        path = "/" + self.path.replace("\\", "/")
        return "/torch/profiler/" in path or path.endswith("/torch/autograd/profiler.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallMoment:
    """A host thread at one call, with all open events, outermost first."""

    operators: tuple[Event, ...]
    frames: tuple[Event, ...]

    @property
    def innermost(self) -> Event | None:
        """The innermost operator that is not an annotation."""
        return next((op for op in reversed(self.operators) if not is_annotation(op)), None)

    @property
    def backward(self) -> Event | None:
        """The backward operator around the call that holds the sequence number, if any."""
        return next((op for op in self.operators if is_backward(op)), None)


def is_annotation(operator: Event) -> bool:
    """Return True for a `record_function` range, False for an operator."""
    return "::" not in operator.name and not operator.name.endswith(("Backward", "Backward0"))


def is_backward(operator: Event) -> bool:
    """Return True for a backward operator with its forward operator's number."""
    args = operator.args
    if args is None or args.sequence is None:
        return False
    return operator.name.startswith(_BACKWARD) or (
        args.forward_thread not in (None, 0) and "Backward" in operator.name
    )


def lane_of(event: Event) -> Lane:
    """Return an event's process and thread."""
    return (str(event.pid), str(event.tid))


def moments(trace: Trace, calls: Iterable[Event]) -> list[CallMoment]:
    """Return the open events around each call, in the order given."""
    by_lane: dict[Lane, list[tuple[float, int, Event]]] = {}
    for number, call in enumerate(calls):
        by_lane.setdefault(lane_of(call), []).append((call.ts, number, call))
    opened: dict[Lane, list[Event]] = {lane: [] for lane in by_lane}
    for event in chain(trace.annotations, trace.operators, trace.frames):
        if (here := opened.get(lane_of(event))) is not None:
            here.append(event)
    frames = {id(frame) for frame in trace.frames}
    found: dict[int, CallMoment] = {}
    for lane, numbered in by_lane.items():
        events = sorted(opened[lane], key=lambda event: (event.ts, -event.dur))
        stack: list[Event] = []
        at = 0
        for time, number, call in sorted(numbered, key=lambda entry: entry[:2]):
            while at < len(events) and events[at].ts <= time:
                while stack and stack[-1].end < events[at].ts:
                    stack.pop()
                stack.append(events[at])
                at += 1
            end = max(call.end - _HOST_ROUNDING_US, time)
            around = [event for event in stack[-_DEEPEST:] if event.end >= end]
            found[number] = CallMoment(
                operators=tuple(event for event in around if id(event) not in frames),
                frames=tuple(event for event in around if id(event) in frames),
            )
    return [found[number] for number in range(len(found))]


def parse_frame(name: str, *, exact: bool) -> Frame | None:
    """Parse `path(line): function`. Return None if it is not a frame in a file."""
    match = _FRAME.fullmatch(name[:_MOST_TEXT])
    if match is None:
        return None
    return Frame(match["path"], int(match["line"]), match["function"], exact)


def frames_of(moment: CallMoment) -> list[Frame]:
    """Return the file frames around a moment, innermost first.

    Newer traces have an event for each frame, with the line of the function's definition; older ones have a
    `Call stack` on the operator, with the line of the call.
    """
    found = [parse_frame(frame.name, exact=False) for frame in reversed(moment.frames)]
    if not any(found):
        stacks = (op.args.stack for op in reversed(moment.operators) if op.args and op.args.stack)
        found = [parse_frame(text, exact=True) for text in next(stacks, "").split(";")]
    return [frame for frame in found if frame is not None]


def place_of(
    frames: Sequence[Frame], is_users: Callable[[str], bool] = lambda _: False
) -> Frame | None:
    """Return the frame to name, given frames with the innermost first.

    It is the innermost in a file that `is_users`, else outside PyTorch and installed packages, else outside
    PyTorch. Newer traces omit the folder of installed packages, so without `is_users` the frame may be a
    library's.
    """
    own = [frame for frame in frames if not frame.is_torch]
    users = (frame for frame in own if is_users(frame.path))
    outside = (frame for frame in own if not frame.is_installed)
    return next(chain(users, outside, own), None)
