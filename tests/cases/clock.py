"""A clock for the emulated device, which shares no code with the simulator.

Each stream has the moment at which it is ready. An operator or a copy begins when its stream is ready and
ends as long after as it takes; an event has the moment of what is before it; a wait makes its stream ready no
earlier than that. All streams share one link to the host, one lane in each direction.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torchtrim.dispatch.calls import heard_by, stream_number

Key = tuple[str, int]


class DeviceClock:
    """Hears what an emulation does. `seconds` has what the n-th operator of a name takes on the device.

    `link` is in bytes a second, and a copy that is queued keeps compute for `queueing` seconds. An operator
    on a list of `elements` takes a share of what it takes for all, however often it runs. `stalls`: for how
    long compute stood still at each wait.
    """

    def __init__(
        self, seconds: dict[Key, float], link: float, queueing: float, elements: int = 0
    ) -> None:
        self.stalls: list[float] = []
        self.copies: list[tuple[str, float, float]] = []
        self.busy = 0.0
        self._seconds = seconds
        self._link = link
        self._queueing = queueing
        self._elements = elements
        self._kinds = Counter(name for name, _ in seconds)
        self._ready: defaultdict[int, float] = defaultdict(float)
        self._free: defaultdict[str, float] = defaultdict(float)
        self._events: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self._seen: Counter[str] = Counter()

    @property
    def stall(self) -> float:
        """Seconds that compute stood still."""
        return sum(self.stalls)

    def event_recorded(self, event: Any, stream: int) -> None:
        """An event has the moment of what its stream has got."""
        self._events[event] = self._ready[stream]

    def event_awaited(self, event: Any, stream: int) -> None:
        """A stream goes on no earlier than an event."""
        late = self._events.get(event, 0.0) - self._ready[stream]
        if late > 0.0:
            self._ready[stream] += late
            if stream == 0:
                self.stalls.append(late)

    def synchronized(self, row: str, subject: Any) -> None:
        """The host waits; that is no matter of the device."""

    def host_read(self, tensor: Any) -> None:
        """As above."""

    def ran(self, name: str, args: Any, stream: int, *, down: bool) -> None:
        """An operator was queued."""
        if stream and name == "aten::copy_":
            self._copied(args[0].nbytes, stream, "out" if down else "home")
        elif not stream:
            took = self._took(name, args)
            self._seen[name] += 1
            self.busy += took
            self._ready[0] += took

    def _took(self, name: str, args: Any) -> float:
        number = self._seen[name]
        if not (self._elements and name.startswith("aten::_foreach_") and self._kinds[name]):
            return self._seconds.get((name, number), 0.0)
        share = sum(one.numel() for one in args[0]) / self._elements
        return self._seconds[name, number % self._kinds[name]] * share

    def _copied(self, size: int, stream: int, lane: str) -> None:
        self._ready[0] += self._queueing
        begin = max(self._ready[stream], self._free[lane], self._ready[0])
        end = begin + size / self._link
        self._ready[stream] = self._free[lane] = end
        self.copies.append((lane, begin, end))


@contextlib.contextmanager
def clocked(emulation: Any, clock: DeviceClock) -> Iterator[None]:
    """Have a clock hear what an emulation with an order of streams does."""
    orders = emulation.orders
    run: Callable[..., Any] = orders.run

    def heard(inner: Any, func: Any, args: Any, kwargs: Any, *, down: bool) -> Any:
        name = func.name().partition(".")[0]
        to_host = name == "aten::copy_" and not emulation.tags.on_device(args[0])
        clock.ran(name, args, stream_number(), down=down or to_host)
        return run(inner, func, args, kwargs, down=down)

    orders.run = heard
    try:
        with heard_by(clock):
            yield
    finally:
        del orders.run


def seconds_of(names: list[str], seconds: list[float]) -> dict[Key, float]:
    """What the n-th operator of each name takes, from operators in their order."""
    seen: Counter[str] = Counter()
    found = {}
    for name, took in zip(names, seconds, strict=True):
        short = name.partition(".")[0]
        found[short, seen[short]] = took
        seen[short] += 1
    return found
