"""The bytes that a plan frees: the share of each technique between the planned curve and the original."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from torchtrim.analysis.timeline import timeline
from torchtrim.core.units import format_bytes
from torchtrim.planner.freed import FreedBytes
from torchtrim.records import Profile
from torchtrim.records.operator_names import base_name
from torchtrim.report.charts import Picture, during, stairs

_AHEAD = 64  # Arbitrary; operators to look ahead for the same one in the original.
_SHADES = 6  # As many colours of techniques as the style sheet has (`t-0` to `t-5`).


@dataclass(frozen=True, kw_only=True)
class Band:
    """The bytes that a technique freed in each column of the chart, and where it freed most of them."""

    number: int
    technique: str
    most_bytes: int
    where: str
    values: Sequence[int]
    column: int

    @property
    def shade(self) -> str:
        """The class of its colour."""
        return f"t-{(self.number - 1) % _SHADES}"

    @property
    def words(self) -> str:
        """Its line in the legend."""
        return f"{self.technique} frees up to {format_bytes(self.most_bytes)}, {self.where}"


@dataclass(frozen=True, kw_only=True)
class Freed:
    """Bytes in each column of a chart: of the planned step, of the bands above them, and of the original."""

    planned: Sequence[int]
    bands: Sequence[Band]
    original: Sequence[int]


def freed(
    drawn: Picture, before: Profile, after: Profile, found: Sequence[FreedBytes], others: str
) -> Freed:
    """Return what each technique freed, in the columns of the planned chart `drawn`.

    `others`: the techniques whose effect is not simulated; they get what is left.
    """
    same = same_operators(before, after)
    high = timeline(before).high
    places = [0, *(same[operator] for operator in drawn.operators)]
    columns = [
        max(range(min(a, b), max(a, b) + 1), key=high.__getitem__) for a, b in pairwise(places)
    ]
    original = [high[at] for at in columns]
    room = [max(whole - left, 0) for whole, left in zip(original, drawn.totals, strict=True)]
    shares: list[tuple[str, list[int]]] = []
    for one in found:
        values = [min(max(one.bytes[at], 0), left) for at, left in zip(columns, room, strict=True)]
        room = [left - value for left, value in zip(room, values, strict=True)]
        shares.append((one.technique, values))
    shares += [(others, room)] if others else []
    return Freed(planned=drawn.totals, bands=[*_bands(before, columns, shares)], original=original)


def predicted(drawn: Picture, before: Profile, found: Sequence[FreedBytes]) -> Freed:
    """Return what each technique would free, in the columns of the original's chart `drawn`."""
    shares = [(one.technique, [max(one.bytes[at], 0) for at in drawn.operators]) for one in found]
    saved = [sum(column) for column in zip(*(values for _, values in shares), strict=True)]
    planned = [max(whole - less, 0) for whole, less in zip(drawn.totals, saved, strict=True)]
    bands = [*_bands(before, drawn.operators, shares)]
    return Freed(planned=planned, bands=bands, original=drawn.totals)


def _bands(
    before: Profile, operators: Sequence[int], shares: Sequence[tuple[str, Sequence[int]]]
) -> Iterator[Band]:
    """Yield the bands that have bytes. `operators`: the original's in each column."""
    for number, (technique, values) in enumerate((one for one in shares if any(one[1])), 1):
        column = max(range(len(values)), key=values.__getitem__)
        yield Band(
            number=number,
            technique=technique,
            most_bytes=values[column],
            where=_where(before, operators[column]),
            values=values,
            column=column,
        )


def _where(profile: Profile, operator: int) -> str:
    return during(profile.operators[operator].phase, profile.module_of(operator))


def same_operators(before: Profile, after: Profile) -> list[int]:
    """Return for each planned operator the same one of the original, or the one that was reached by then."""
    originals = [*_keys(before)]
    found, at = [], -1
    for key, op in zip(_keys(after), after.operators, strict=True):
        ahead = originals[at + 1 : at + 1 + _AHEAD] if op.phase != "recompute" else []
        at += ahead.index(key) + 1 if key in ahead else 0
        found.append(max(at, 0))
    return found


def _keys(profile: Profile) -> Iterator[tuple[str, str, str]]:
    for number, op in enumerate(profile.operators):
        yield base_name(op.name).rstrip("_"), op.phase, profile.module_of(number)


def areas(found: Freed, top: float) -> Markup:
    """Draw the bands on the planned curve, and the original's curve above them."""
    shapes = [
        Markup('<path class="freed {}" d="M0 {}{}Z"/>').format(
            band.shade, stairs(upper, top), stairs(lower, top, back=True)
        )
        for band, lower, upper in _stacked(found)
    ]
    line = stairs(found.original, top)
    below = stairs(found.planned, top, back=True)
    fade = Markup('<path class="fade" d="M0 {}{}Z"/>').format(line, below)
    ghost = Markup('<path class="ghost" d="M0 {}"/>').format(line)
    return Markup().join([fade, *shapes, ghost])


def marks(found: Freed, top: float) -> Markup:
    """Draw each band's number where it is highest."""
    return Markup().join(
        Markup('<b class="mark {}" style="left:{:.2f}%;bottom:{:.2f}%">{}</b>').format(
            band.shade,
            100 * (band.column + 0.5) / len(lower),
            50 * (lower[band.column] + upper[band.column]) / top,
            band.number,
        )
        for band, lower, upper in _stacked(found)
    )


def _stacked(found: Freed) -> Iterator[tuple[Band, Sequence[int], Sequence[int]]]:
    """Yield each band with its lower and its upper edge."""
    lower = found.planned
    for band in found.bands:
        upper = [a + b for a, b in zip(lower, band.values, strict=True)]
        yield band, lower, upper
        lower = upper
