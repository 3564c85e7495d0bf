"""How large a finding's price is, beside what it is a part of."""

from __future__ import annotations

from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile

LOADER = "TT301"


def time_share(profile: Profile, finding: Finding) -> float:
    """The part of the step's time; a loader's is of the step that was timed with it."""
    step = profile.step_seconds
    if finding.code == LOADER and profile.loader is not None:
        step = profile.loader.step_seconds
    return (finding.price_ms or 0.0) / 1e3 / max(step, 1e-9)


def memory_share(profile: Profile, finding: Finding) -> float:
    """The part of the peak."""
    return (finding.price_bytes or 0) / max(profile.peak_bytes, 1)
