"""An edit: what an option changes in a step, as data.

Whatever a technique does to memory and time is said in these few terms, so that the simulator knows none of
them by name: holds that end, tensors that are needed longer, blocks that are there besides, work that is
inserted. Two edits conflict if they claim the same tasks.
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

    @property
    def seconds(self) -> float:
        """Seconds of all inserted work."""
        return sum(insert.seconds for insert in self.inserts)


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
    for edit in edits:
        drops += edit.drops
        needs += edit.needs
        blocks += edit.blocks
        inserts += edit.inserts
        rises += edit.rises
        claims += edit.claims
        overwrites += edit.overwrites
    return Edit(
        tuple(drops),
        tuple(needs),
        tuple(blocks),
        tuple(inserts),
        tuple(rises),
        tuple(claims),
        tuple(overwrites),
    )
