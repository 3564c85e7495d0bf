"""What the rules have in common that find something kept for nothing."""

from __future__ import annotations

from torchtrim.analysis.places import Line
from torchtrim.records.finding import Equivalence, Finding, Suggestion
from torchtrim.records.profile import Profile

_SHARE = 0.02  # Arbitrary; freeing less is not worth a change of code.


def is_much(profile: Profile, size: int) -> bool:
    """Whether bytes are worth a finding: two hundredths of the peak."""
    return size >= _SHARE * profile.tracked_peak_bytes and size > 0


def finding_at(
    code: str,
    line: Line,
    price: int,
    message: str,
    advice: str,
    *,
    count: int = 1,
    equivalence: Equivalence = "BITWISE",
) -> Finding:
    """A finding whose price is by how much the peak would be lower."""
    return Finding(
        code=code,
        path=line.path,
        line=line.line,
        end_line=line.line,
        message=message,
        count_per_step=count,
        price_bytes=price,
        source="modelled",
        fix=Suggestion(kind="advice", equivalence=equivalence, reason=advice),
    )
