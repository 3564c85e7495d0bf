from typing import Any

import pytest
from msgspec.structs import replace

from techniques.test_plain_optimizer import wide_step
from torchtrim.core.units import format_bytes
from torchtrim.records.profile import Profile
from torchtrim.records.trial import Request
from torchtrim.rules.tt204_optimizer_temporaries import check
from torchtrim.workflows.optimize.fitting import Fitting


def profile_of(**settings: Any) -> Profile:
    trial = Fitting(wide_step(**settings), Request(steps=1), lambda _: None).observe()
    assert trial.profile is not None
    return trial.profile


@pytest.fixture(scope="module")
def foreach() -> Profile:
    return profile_of(foreach=True)


def test_a_step_that_takes_all_parameters_at_once(foreach: Profile) -> None:
    (finding,) = check(foreach)
    parameters = 6 * (128 * 128 + 128) * 4
    assert finding.price_bytes is not None
    assert parameters * 0.7 < finding.price_bytes < parameters
    assert (finding.code, finding.source) == ("TT204", "modelled")
    assert finding.message == (
        "AdamW updates 12 parameters at once (foreach), and its temporaries set the peak; "
        f"one at a time would free {format_bytes(finding.price_bytes)}, "
        f"{finding.price_bytes / foreach.peak_bytes:.0%} of the peak"
    )
    assert finding.fix is not None
    assert finding.fix.kind == "advice"


@pytest.mark.parametrize("settings", [{"foreach": False}, {"fused": True}])
def test_a_step_that_takes_one_at_a_time_is_silent(settings: dict[str, bool]) -> None:
    assert not list(check(profile_of(**settings)))


def test_it_is_silent_where_the_peak_is_elsewhere(foreach: Profile) -> None:
    first, *rest = foreach.operators
    high = replace(first, transient_bytes=2**30)
    assert not list(check(replace(foreach, operators=[high, *rest])))


def test_it_is_silent_where_the_optimizer_is_not_understood(foreach: Profile) -> None:
    theirs = [replace(step, type="apex.AdamW") for step in foreach.optimizer_steps]
    assert not list(check(replace(foreach, optimizer_steps=theirs)))
