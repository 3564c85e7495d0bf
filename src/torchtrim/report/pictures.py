"""What the charts of a report show: a profile as layers of memory over the step."""

from __future__ import annotations

from torchtrim.analysis.timeline import kinds_over_time
from torchtrim.core.units import format_bytes
from torchtrim.records import Profile
from torchtrim.report.safe import clean, keep_right
from torchtrim.report.svg import Layer, Picture

ORDER = (
    "parameter",
    "buffer",
    "optimizer_state",
    "gradient",
    "gathered",
    "input",
    "activation",
    "temporary",
    "workspace",
)
_COLUMNS = 400
_NOTICEABLE = 200


def picture(profile: Profile, title: str) -> Picture | None:
    """Memory by kind over the step; None for a profile without operators."""
    samples = kinds_over_time(profile, _COLUMNS)
    if not samples:
        return None
    totals = [sum(sample.by_kind.values()) for sample in samples]
    column = totals.index(max(totals))
    kinds = [kind for kind in ORDER if kind in samples[0].by_kind]
    layers = [Layer(kind=kind, values=[s.by_kind[kind] for s in samples]) for kind in kinds]
    where = _where(profile, samples[column].operator)
    return Picture(
        layers=layers,
        phases=[profile.operators[sample.operator].phase for sample in samples],
        peak_column=column,
        peak_bytes=totals[column],
        peak_name="peak" if _seen(profile, totals[column]) else "tracked peak",
        where=where,
        summary=f"{title}: memory by kind over the step, {format_bytes(totals[column])} {where}",
    )


def _where(profile: Profile, operator: int) -> str:
    module = keep_right(clean(profile.module_of(operator)), 60)
    phase = profile.operators[operator].phase
    return f"in {module}, {phase}" if module else f"in {phase}"


def _seen(profile: Profile, drawn: int) -> bool:
    return abs(profile.peak_bytes - drawn) <= profile.peak_bytes / _NOTICEABLE


def unseen(profile: Profile, drawn: Picture) -> int:
    """Bytes of the measured peak that no operator accounts for; 0 where they are too few to see."""
    if _seen(profile, drawn.peak_bytes):
        return 0
    return max(profile.peak_bytes - drawn.peak_bytes, 0)
