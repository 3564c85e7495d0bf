"""One thread that launches operators in their order on one stream, and synchronizes with it now and then.

What operators between two waits do to the two clocks, the host's and the stream's, is one step of max-plus
algebra (Baccelli, Cohen, Olsder and Quadrat, "Synchronization and Linearity", Wiley 1992), so a replay takes
as many steps as there are waits, however many operators.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

END = -2
"""The site of the last stretch, after which nothing waits."""

_NEVER = float("-inf")


class Stretches(NamedTuple):
    """What happens up to each wait and up to the end, as columns.

    The host goes on by `host`. The stream is free `device` after it was, or `both` after the host
    began, whichever is later. Then the host synchronizes at `site`.
    """

    host: array[float]
    device: array[float]
    both: array[float]
    site: array[int]


class Moments(NamedTuple):
    """When, in microseconds from the start: each operator on the host and on the stream, each wait.

    `device` is not a number for an operator that launches nothing.
    """

    host: array[float]
    device: array[float]
    waits: array[float]
    until: array[float]


@dataclass(frozen=True, kw_only=True)
class OneStream:
    """What the host and the device spend on each operator, in microseconds, and where the host waits.

    An operator whose `device` is 0 launches nothing. A launch takes `launch` to arrive, the stream `gap`
    from one to the next, a wait `back` to return. The host waits after the operators `after`, which come in
    their order, at `sites`.
    """

    host: Sequence[float]
    device: Sequence[float]
    launch: float
    gap: float
    back: float
    after: Sequence[int]
    sites: Sequence[int]

    @cached_property
    def steps(self) -> array[int]:
        """The sites of the stretches: a replay takes as many steps."""
        return self._recorded.site

    @cached_property
    def _recorded(self) -> Stretches:
        return self._made(1.0, 1.0)

    def stretches(self, host: float = 1.0, device: float = 1.0) -> Stretches:
        """The stretches, with what the host and the device spend scaled."""
        scaled = (host, device) != (1.0, 1.0)
        return self._made(host, device) if scaled else self._recorded

    def _made(self, host: float, device: float) -> Stretches:
        found = Stretches(array("d"), array("d"), array("d"), array("q"))
        first = 0
        for after, site in zip((*self.after, len(self.host) - 1), (*self.sites, END), strict=True):
            went, kept, both = self._stretch(first, after + 1, host, device)
            found.host.append(went)
            found.device.append(kept)
            found.both.append(both)
            found.site.append(site)
            first = after + 1
        return found

    def _stretch(
        self, first: int, last: int, host: float, device: float
    ) -> tuple[float, float, float]:
        went, kept, both = 0.0, 0.0, _NEVER
        for own, work in zip(self.host[first:last], self.device[first:last], strict=True):
            if work:
                adds = self.gap + work * device
                kept += adds
                both = max(both + adds, went + self.launch + work * device)
            went += own * host
        return went, kept, both

    def moments(self) -> Moments:
        """When everything happens."""
        found = Moments(array("d"), array("d"), array("d"), array("d"))
        now, free, at = 0.0, _NEVER, 0
        for number, (own, work) in enumerate(zip(self.host, self.device, strict=True)):
            start = max(now + self.launch, free + self.gap) if work else float("nan")
            found.host.append(now)
            found.device.append(start)
            free = start + work if work else free
            now += own
            while at < len(self.after) and self.after[at] == number:
                found.waits.append(now)
                now = max(now, free + self.back)
                found.until.append(now)
                at += 1
        return found
