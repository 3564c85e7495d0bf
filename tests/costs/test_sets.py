"""Prices: alone, in sets, ranked, and bounded."""

import pytest

from torchtrim.costs.replay import (
    Activity,
    Does,
    ReplayProgram,
    ReplayStep,
    bound,
    price,
    replay,
)


def displaced(waits: int, gain: float = 1000.0) -> ReplayProgram:
    """One long kernel that `waits` reads wait for, one after the other, and host work of `gain` after."""
    program = ReplayProgram(lanes=1, streams=1, activities=1, tails=[gain])
    program.steps.append(ReplayStep(Does.LAUNCH, 0, 0.0, 5.0, (Activity(0, 0, 5000.0, 10.0, 1.0),)))
    for site in range(waits):
        program.steps.append(ReplayStep(Does.WAIT, 0, 1.0, 5.0, awaits=(0,), back=3.0, site=site))
    return program


def test_only_all_of_them_together_gain() -> None:
    prices = price(displaced(3), [0, 1, 2])
    assert all(gain < 20 for gain in prices.alone.values())
    assert prices.together > 900
    assert prices.sets[0][0] == {0, 1, 2}
    assert prices.unpriced == 0


def test_a_set_is_left_out_where_a_smaller_gains_as_much() -> None:
    program = displaced(1)
    program.steps.append(ReplayStep(Does.WAIT, 0, 1.0, 5.0, site=1))
    prices = price(program, [0, 1])
    assert prices.sets[0][0] in ({0}, {0, 1})
    for chosen, gain in prices.sets:
        assert not any(other < chosen and g * 1.01 >= gain for other, g in prices.sets)


def test_nothing_to_gain() -> None:
    program = displaced(2, gain=0.0)
    prices = price(program, [0, 1])
    assert prices.alone[0] < 20
    assert price(displaced(0), []).sets == []


def test_replays_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr("torchtrim.costs.replay._STEPS_A_REPORT", 1)
    monkeypatch.setattr("torchtrim.costs.replay._FEWEST_REPLAYS", 6)
    prices = price(displaced(30), list(range(30)))
    assert len(prices.alone) == 5
    assert prices.unpriced == 25
    assert prices.together > 900


def test_sites_apart_are_priced_alone_only() -> None:
    prices = price(displaced(2), [0], apart=[1])
    assert set(prices.alone) == {0, 1}
    assert all(1 not in chosen for chosen, _ in prices.sets)


def alternating(host: float, device: float, waits: bool = True) -> ReplayProgram:
    """The host works, then the device, ten times, with a wait after each or without."""
    program = ReplayProgram(lanes=1, streams=1, activities=10, tails=[0.0])
    for n in range(10):
        launched = (Activity(n, 0, device, 5.0, 1.0),)
        program.steps.append(ReplayStep(Does.LAUNCH, 0, host, 5.0, launched))
        if waits:
            program.steps.append(ReplayStep(Does.WAIT, 0, 0.0, 3.0, awaits=(n,), back=3.0, site=0))
    return program


@pytest.mark.parametrize(
    ("program", "loading", "verdict"),
    [
        (alternating(1000, 30), 0.0, "host"),
        (alternating(1000, 30), 0.5, "loader"),
        (alternating(30, 1000), 0.5, "device"),
        (alternating(600, 500), 0.0, "waits"),
        (alternating(1000, 70), 0.0, "host"),
    ],
)
def test_verdicts(program: ReplayProgram, loading: float, verdict: str) -> None:
    base = replay(program).span
    gained = base - replay(program, {0}).span
    assert bound(program, gained=gained, span=base, loading=loading * base) == verdict


def test_nothing_happened() -> None:
    assert bound(ReplayProgram(), gained=0.0, span=0.0, loading=0.0) == "unknown"
