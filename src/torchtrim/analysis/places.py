"""Where a finding points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from torchtrim.records.profile import Profile


class Line(NamedTuple):
    """A line of source; line 0 of the script where none is known."""

    path: str
    line: int


def line_of(profile: Profile, operator: int) -> Line:
    """The line that asked for an operator; for one of backward, for its forward operator."""
    if operator < 0:
        return Line(profile.script, 0)
    forward = profile.operators[operator].forward
    place = profile.place_of(forward if forward >= 0 else operator)
    return Line(place.path, place.line) if place else Line(profile.script, 0)


def by_line(profile: Profile, operators: Iterable[int]) -> dict[Line, list[int]]:
    """Operators grouped by the line that asked for them."""
    lines: dict[Line, list[int]] = defaultdict(list)
    for operator in operators:
        lines[line_of(profile, operator)].append(operator)
    return dict(lines)
