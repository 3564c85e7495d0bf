"""What grows from step to step, looked for only where there are steps enough to tell."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtrim.capture.growth import steps as growth_steps
from torchtrim.capture.growth.steps import LEAST_LOOKS, StepGrowth
from torchtrim.dispatch.places import Places

KEPT: list[Any] = []


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(sys.modules[__name__], "KEPT", found)
    return found


def growth_of(steps: int, body: Callable[[int], None]) -> StepGrowth:
    """After so many steps."""
    growth = StepGrowth(steps, Places(str(Path(__file__).parent)), list)
    for step in range(steps):
        body(step)
        growth.step_ended(0)
    return growth


@pytest.mark.parametrize(("steps", "follows"), [(0, False), (3, False), (LEAST_LOOKS + 1, True)])
def test_lines_are_followed_in_one_step_more_and_not_where_steps_are_few(
    steps: int, follows: bool, kept: list[Any]
) -> None:
    outer = sys.gettrace()
    growth = growth_of(steps, kept.append)
    assert sys.gettrace() is outer
    assert growth.next(0.0) == growth.runs == follows
    assert (sys.gettrace() is not outer) == follows
    growth.step_ends()
    assert sys.gettrace() is outer
    assert not growth.next(0.0)


def test_nothing_is_followed_where_nothing_grows() -> None:
    outer = sys.gettrace()
    growth = growth_of(LEAST_LOOKS + 1, lambda _: None)
    assert not growth.next(0.0)
    assert sys.gettrace() is outer


def test_of_several_ranks_all_run_the_step_that_one_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth_steps, "rank_and_world", lambda: (1, 2))
    outer = sys.gettrace()
    growth = growth_of(LEAST_LOOKS + 1, lambda _: None)
    assert growth.next(0.0)
    assert growth.runs
    assert sys.gettrace() is outer
    growth.step_ends()
    assert not growth.runs
    assert not growth.next(0.0)


class Big(list[int]):
    """A list to which a weak reference can be."""


def test_what_a_step_frees_is_not_kept_for_the_next_look(kept: list[Any]) -> None:
    freed: list[bool] = []
    former: list[weakref.ref[Big]] = []

    def body(step: int) -> None:
        freed.extend(one() is None for one in former)
        kept[:] = [Big(range(step))]
        former[:] = [weakref.ref(kept[0])]

    growth_of(LEAST_LOOKS + 2, lambda step: (kept.clear(), body(step))[-1])
    assert all(freed)
    assert len(freed) == LEAST_LOOKS + 1


def test_what_grows_no_more_in_the_step_that_is_followed_is_no_container_that_grows(
    kept: list[Any],
) -> None:
    growths = []
    for goes_on in (True, False):
        kept.clear()
        growth = growth_of(LEAST_LOOKS + 1, kept.append)
        assert growth.next(0.0)
        if goes_on:
            kept.append(0)
        growth.step_ends()
        growths.append([one.name for one in growth._of_containers([])])
    assert [bool(names) for names in growths] == [True, False]
