"""How a plan writes its offloads: `Net:gelu.3 until addmm.9 from addmm.12`."""

from __future__ import annotations

import re
from typing import NamedTuple

from torchtrim.errors import ApplyFailed
from torchtrim.techniques.replay.places import Run, run_of

_RUN = r"\w+(?:\.\d+)?"
_WHERE = re.compile(
    rf"(?P<root>[^:]+):(?P<made>{_RUN})(?:/(?P<result>\d+))? until (?P<until>{_RUN}) from (?P<trigger>{_RUN})"
    r"(?P<file> in file)?(?: at (?P<offsets>\d+(?:,\d+)*))?"
)
UNSEEN = frozenset(("", "detach", "alias", "lift_fresh"))
"""No sign of how far a call is: operators that others than the program run, or that are not torch's."""
END = Run("end", 0)
"""In place of an operator: when the call of the root ends."""


class Place(NamedTuple):
    """What an operator of a root's call makes, its result of that number.

    It is let go when operator `until` begins, and fetched when backward comes to what `trigger` saved.
    """

    root: str
    made: Run
    result: int
    until: Run
    trigger: Run

    def __str__(self) -> str:
        result = f"/{self.result}" if self.result else ""
        until = "end" if self.until == END else _text(self.until)
        return f"{self.root}:{_text(self.made)}{result} until {until} from {_text(self.trigger)}"


def place_of(where: str) -> Place:
    """The place that a plan names. Raises `ApplyFailed` for what is none."""
    return placed(where)[0]


class Room(NamedTuple):
    """Where a place may be in the slab of the host, or of a file: the first of these offsets that is free."""

    offsets: tuple[int, ...] = ()
    in_file: bool = False


def written(place: Place, room: Room) -> str:
    """A place with its room, as a plan writes it."""
    text = f"{place} in file" if room.in_file else str(place)
    return f"{text} at {','.join(map(str, room.offsets))}" if room.offsets else text


def placed(where: str) -> tuple[Place, Room]:
    """The place that a plan names, and its room. Raises `ApplyFailed` for what is none."""
    match = _WHERE.fullmatch(where)
    if match is None:
        raise ApplyFailed(
            f"cannot read {where!r} as a place. Write a root, what makes the tensor, when it is let go and "
            "when it is fetched, such as Net:gelu.3 until addmm.9 from addmm.12."
        )
    place = Place(
        match["root"],
        run_of(match["made"]),
        int(match["result"] or 0),
        run_of(match["until"]),
        run_of(match["trigger"]),
    )
    offsets = tuple(map(int, match["offsets"].split(","))) if match["offsets"] else ()
    return place, Room(offsets, bool(match["file"]))


def _text(run: Run) -> str:
    return f"{run.name}.{run.ordinal}"
