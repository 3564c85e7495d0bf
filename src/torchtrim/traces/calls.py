"""What a call of the CUDA or HIP runtime does to the host, from its name."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

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
_BETWEEN = "3"
_KINDS_OF_COPIES = ("0", "1", "2", _BETWEEN)
WAITING: frozenset[Kind] = frozenset(("stream", "event", "device", "copy"))


@cache
def kind_of(name: str) -> Kind:
    """What the call does.

    `stream`, `event` and `device` synchronize one stream, one event or the whole device. `copy` is a copy
    that returns when it is done (`cudaMemcpy`, `hipMemcpyWithStream`). `record` and `order` are event
    records and waits of a stream for an event. All others are `other`.
    """
    plain = _SUFFIX.sub("", _PREFIX.sub("", name))
    if plain in _KINDS:
        return _KINDS[plain]
    return "copy" if _BLOCKING_COPY.match(plain) else "other"


def is_pageable(activity: str) -> bool:
    """Whether a copy on the device is from or to pageable host memory, for which the host waits."""
    return activity.startswith("Memcpy") and "Pageable" in activity


def is_between_devices(activity: str, kind: object = None) -> bool:
    """Whether a copy stays on devices, for which the host does not wait.

    `kind` is `args.kind` of the call, which ROCm's tracer writes: `hipMemcpyKind`, 1 to the device, 2 to the
    host, 3 between devices. It is the requested kind; the activity's label may say "DtoD" of all three.
    """
    asked = str(kind)
    if asked in _KINDS_OF_COPIES:
        return asked == _BETWEEN
    return activity.startswith(("Memcpy DtoD", "Memcpy PtoP"))
