"""What grows from step to step, looked for only where there are steps enough to tell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchtrim.observe.places import Places
from torchtrim.observe.step_growth import LEAST_LOOKS, StepGrowth


@pytest.mark.parametrize(("steps", "traced"), [(3, False), (LEAST_LOOKS + 1, True)])
def test_lines_are_followed_in_the_last_step_alone_and_not_where_steps_are_few(
    steps: int, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(sys.modules[__name__], "KEPT", found)
    growth, outer, seen = (
        StepGrowth(steps, Places(str(Path(__file__).parent)), list),
        sys.gettrace(),
        [],
    )
    for step in range(steps):
        found.append(step)
        growth.step_ended(0)
        seen.append(sys.gettrace() is not outer)
    assert seen == [traced and step == steps - 2 for step in range(steps)]


KEPT: list[int] = []
