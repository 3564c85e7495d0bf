"""Names of offloaded tensors: `Net:gelu.3 until addmm.9 from addmm.12`."""

from __future__ import annotations

import re
from typing import NamedTuple

from torchtrim.errors import ApplyFailed
from torchtrim.executor.roles import OperatorOrdinal
from torchtrim.techniques.replay.places import run_of

_RUN = r"[\w-]+(?:\.\d+)?"
_WHERE = re.compile(
    rf"(?P<root>[^:]+):(?P<made>{_RUN})(?:/(?P<result>\d+))? until (?P<until>{_RUN}) from (?P<trigger>{_RUN})"
    r"(?P<file> in file)?(?: at (?P<offsets>\d+(?:,\d+)*))?"
)
END = OperatorOrdinal("end", 0)
"""Stands for the end of the root's call."""


class OffloadPlace(NamedTuple):
    """Result number `output` of an operator in a root's call.

    It is freed when operator `until` starts, and fetched when backward reads what `trigger` saved.
    """

    root: str
    made: OperatorOrdinal
    result: int
    until: OperatorOrdinal
    trigger: OperatorOrdinal

    def __str__(self) -> str:
        result = f"/{self.result}" if self.result else ""
        until = "end" if self.until == END else _text(self.until)
        return f"{self.root}:{_text(self.made)}{result} until {until} from {_text(self.trigger)}"


def place_of(where: str) -> OffloadPlace:
    """Return the place that a plan names. Raises `ApplyFailed` if the text is not a place."""
    return placed(where)[0]


class Room(NamedTuple):
    """Possible offsets of a place in the slab of the host or of a file: the first free one is used."""

    offsets: tuple[int, ...] = ()
    in_file: bool = False


def written(place: OffloadPlace, room: Room) -> str:
    """Format a place with its offsets as in a plan."""
    text = f"{place} in file" if room.in_file else str(place)
    return f"{text} at {','.join(map(str, room.offsets))}" if room.offsets else text


def placed(where: str) -> tuple[OffloadPlace, Room]:
    """Return the place that a plan names, and its offsets. Raises `ApplyFailed` if it is not a place."""
    match = _WHERE.fullmatch(where)
    if match is None:
        raise ApplyFailed(
            f"cannot read {where!r} as a place. Write a root, the operator that makes the "
            "tensor, the operator that frees it and the one whose backward fetches it, "
            "such as Net:gelu.3 until addmm.9 from addmm.12."
        )
    place = OffloadPlace(
        match["root"],
        run_of(match["made"]),
        int(match["result"] or 0),
        run_of(match["until"]),
        run_of(match["trigger"]),
    )
    offsets = tuple(map(int, match["offsets"].split(","))) if match["offsets"] else ()
    return place, Room(offsets, bool(match["file"]))


def _text(run: OperatorOrdinal) -> str:
    return f"{run.name}.{run.ordinal}"
