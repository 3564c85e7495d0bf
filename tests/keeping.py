"""A script that keeps one thing for nothing, and what the rules say of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from steps import quiet
from torchtrim import Script
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.records.trial import Request
from torchtrim.rules.registry import diagnose
from torchtrim.workflows.optimize.fitting import Fitting

SCRIPT = Path(__file__).parent / "scripts" / "keeps.py"
CODES = ("TT205", "TT206", "TT207", "TT208", "TT209")


@cache
def profile_of(keeps: str) -> Profile:
    """The recorded step of the script."""
    script = Script(str(SCRIPT), (keeps,), timeout=120)
    profile = Fitting(script, Request(steps=1), quiet).observe().profile
    assert profile is not None
    return profile


def the_only_finding(keeps: str, code: str, instead: str = "nothing") -> Finding:
    """What is found in a script that keeps that. The price is what it needs over the script that keeps
    nothing, and there nothing is found."""
    assert not diagnose(profile_of(instead), CODES)
    (found,) = diagnose(profile_of(keeps), CODES)
    assert found.code == code
    assert found.fix is not None
    assert found.price_bytes is not None
    peak = profile_of(keeps).tracked_peak_bytes
    assert 0.02 * peak <= found.price_bytes
    assert peak - found.price_bytes >= 0.95 * profile_of(instead).tracked_peak_bytes
    return found
