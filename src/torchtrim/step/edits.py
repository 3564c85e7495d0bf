"""An edit: what an option changes in a step, as data.

Whatever a technique does to memory and time is said in these few terms, so that the simulator knows none of
them by name: holds that end, tensors that are needed longer, blocks that are there besides, work that is
inserted, trips to the host. Two edits conflict if they claim the same tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torchtrim.step.step import DEVICE, Span


class Drop(NamedTuple):
    """Hold number `hold` of a tensor ends when its task has run: nothing keeps it for that reason."""

    tensor: int
    hold: int


class Need(NamedTuple):
    """A tensor is needed until task `until` begins."""

    tensor: int
    until: int


class Block(NamedTuple):
    """Bytes that are there besides, during tasks `first <= i < last`."""

    bytes: int
    first: int
    last: int
    pool: str = DEVICE


class Rise(NamedTuple):
    """While a task runs, memory rises by at most so many bytes: it does its work in another way."""

    task: int
    bytes: int


class Insert(NamedTuple):
    """Work just before task `at`, which takes `seconds` on a lane.

    Memory rises by at most `rise` bytes over what was alive before it. `makes`: bytes of blocks of the same
    edit that it leaves behind, which are alive from `at` on.
    """

    at: int
    seconds: float
    rise: int
    makes: int = 0
    lane: str = "compute"


class Trip(NamedTuple):
    """A tensor's way to the host and back over a link, which takes `seconds` each way.

    Its copy is queued when task `leaves` begins and awaited when `gone` does; the copy back is queued at
    `back` and awaited at `asked`. To queue one keeps compute for `queueing` seconds. `alone`: for how many
    seconds both are awaited if no other is on the link.
    """

    bytes: int
    seconds: float
    leaves: int
    gone: int
    back: int
    asked: int
    queueing: float
    alone: float


class Edit(NamedTuple):
    """A change to a step. `claims`: the tasks that no other edit may change.

    `overwrites`: tasks that write their result over their input. They make another step
    (`step.overwrite`), in which the edits that go with them are to be found.
    """

    drops: tuple[Drop, ...] = ()
    needs: tuple[Need, ...] = ()
    blocks: tuple[Block, ...] = ()
    inserts: tuple[Insert, ...] = ()
    rises: tuple[Rise, ...] = ()
    claims: tuple[Span, ...] = ()
    overwrites: tuple[int, ...] = ()
    trips: tuple[Trip, ...] = ()

    @property
    def work_seconds(self) -> float:
        """Seconds of all inserted work, and of queueing copies."""
        queueing = sum(2 * trip.queueing for trip in self.trips)
        return sum(insert.seconds for insert in self.inserts) + queueing

    @property
    def seconds(self) -> float:
        """Seconds that the edit adds by itself; `step.links` knows what several add together."""
        return self.work_seconds + sum(trip.alone for trip in self.trips)


NOTHING = Edit()


def joined(edits: Iterable[Edit]) -> Edit:
    """Several edits as one."""
    drops: list[Drop] = []
    needs: list[Need] = []
    blocks: list[Block] = []
    inserts: list[Insert] = []
    rises: list[Rise] = []
    claims: list[Span] = []
    overwrites: list[int] = []
    trips: list[Trip] = []
    for edit in edits:
        drops += edit.drops
        needs += edit.needs
        blocks += edit.blocks
        inserts += edit.inserts
        rises += edit.rises
        claims += edit.claims
        overwrites += edit.overwrites
        trips += edit.trips
    return Edit(
        tuple(drops),
        tuple(needs),
        tuple(blocks),
        tuple(inserts),
        tuple(rises),
        tuple(claims),
        tuple(overwrites),
        tuple(trips),
    )
