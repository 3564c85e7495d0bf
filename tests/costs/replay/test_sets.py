"""Prices: alone, in sets, ranked, and bounded."""

from torchtrim.costs.replay import sets
from torchtrim.costs.replay.program import Activity, Does, ReplayProgram, ReplayStep
from torchtrim.costs.replay.sets import price


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
    monkeypatch.setattr(sets, "_STEPS_A_REPORT", 1)
    monkeypatch.setattr(sets, "_FEWEST_REPLAYS", 6)
    prices = price(displaced(30), list(range(30)))
    assert len(prices.alone) == 5
    assert prices.unpriced == 25
    assert prices.together > 900


def test_sites_apart_are_priced_alone_only() -> None:
    prices = price(displaced(2), [0], apart=[1])
    assert set(prices.alone) == {0, 1}
    assert all(1 not in chosen for chosen, _ in prices.sets)
