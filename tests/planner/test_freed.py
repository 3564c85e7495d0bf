"""Bytes freed by each technique over the step: at the peak they are what the plan's effects say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from profiles import training_step
from torchtrim.analysis.timeline import timeline
from torchtrim.planner.freed import freed_bytes
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.profile import Profile


def planned(share: float) -> tuple[Profile, Plan]:
    profile = training_step(device="emulated a100")
    planner = Planner(profile, step_seconds=profile.step_seconds, fingerprint={})
    floor = planner.floor.outcome.peak_bytes
    return profile, planner.plan(Budget(max(int(share * planner.simulated_original), floor)))


@pytest.mark.parametrize("share", [0.9, 0.7, 0.3])
def test_what_remains_has_the_predicted_peak(share: float) -> None:
    profile, plan = planned(share)
    found = freed_bytes(profile, plan.techniques)
    assert {one.technique for one in found} <= {one.name for one in plan.techniques}
    assert plan.techniques
    saved = [sum(column) for column in zip(*(one.bytes for one in found), strict=True)]
    left = [high - less for high, less in zip(timeline(profile).high, saved, strict=True)]
    assert max(left) == plan.predicted.peak_bytes < max(timeline(profile).high)


def test_techniques_that_are_unknown_or_have_no_edits_are_left_out() -> None:
    profile, plan = planned(0.7)
    others = (
        Technique(name="no such technique", where=("net.a",)),
        Technique(name="shard", where=()),
    )
    nowhere = [replace(one, where=("net.nothing",)) for one in plan.techniques]
    assert freed_bytes(profile, others) == freed_bytes(profile, nowhere) == []
    assert freed_bytes(profile, (*others, *plan.techniques)) == freed_bytes(
        profile, plan.techniques
    )
