"""The choice of what compiled graphs save, on graphs that no program made."""

from __future__ import annotations

import pytest

from torchtrim.compiled import choose
from torchtrim.compiled.choose import Saved, SavingProgram
from torchtrim.compiled.joint import Joint, Value
from torchtrim.compiled.memory import Event, Simulated

MIB = 2**20
LAYERS = 8


def layers(*, whole: bool = True) -> Joint:
    """Layers of a norm and a product, which backward reads in reverse. `whole`: norms lie in memory."""
    values: list[Value] = []
    for layer in range(LAYERS):
        at = 2 * (LAYERS - 1 - layer)
        before = (len(values) - 1,) if values else ()
        values.append(_value(f"norm {layer}", 1e-3, before, (at + 1,), stays=whole))
        values.append(_value(f"product {layer}", 1e-2, (len(values) - 1,), (at,)))
    work = tuple(0.01 * (at + 1) for at in range(2 * LAYERS))
    every = frozenset(range(len(values)))
    return Joint("layers", tuple(values), work, (0,) * len(work), every)


def _value(
    key: str, seconds: float, parents: tuple[int, ...], uses: tuple[int, ...], *, stays: bool = True
) -> Value:
    return Value(key, MIB, seconds, parents, uses, stays, can_save=True, can_redo=True)


def program(joint: Joint) -> SavingProgram:
    return SavingProgram([joint], {joint.key: 0})


def chosen(model: SavingProgram, budget: int, own: Saved) -> Saved:
    """The program's choice, or else the own one, improved."""
    return model.improved(model.choose(budget, 5.0) or own, budget, 5.0)


def peak(model: SavingProgram, saved: Saved) -> int:
    """The highest bytes of a choice."""
    return round(model.state(saved).levels.max())


@pytest.fixture(autouse=True)
def _fine_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_FEW", 1)


def test_what_is_saved_by_itself_needs_its_bytes_and_no_time() -> None:
    joint = layers()
    model = program(joint)
    assert peak(model, {joint.key: joint.own}) == 2 * LAYERS * MIB
    assert model.seconds({joint.key: joint.own}) == 0


@pytest.mark.parametrize("budget", [12, 8])
def test_a_choice_fits_its_budget_and_takes_no_more_time_than_a_larger_one(budget: int) -> None:
    joint = layers()
    model = program(joint)
    own = {joint.key: joint.own}
    tight = chosen(model, budget * MIB, own)
    loose = chosen(model, 2 * LAYERS * MIB, own)
    assert peak(model, tight) <= budget * MIB
    assert model.seconds(loose) == 0 < model.seconds(tight)


def test_what_is_computed_again_late_is_not_held_from_the_start() -> None:
    joint = layers()
    model = program(joint)
    # Each second product is saved: two layers at most are computed again at a time.
    saved = {joint.key: frozenset(range(1, 2 * LAYERS, 4))}
    assert peak(model, saved) <= (LAYERS // 2 + 4) * MIB
    assert model.seconds(saved) == pytest.approx(LAYERS * 1e-3 + LAYERS / 2 * 1e-2)


def test_a_fused_value_takes_no_memory_when_it_is_computed_again() -> None:
    joint = layers(whole=False)
    products = {joint.key: frozenset(range(1, 2 * LAYERS, 2))}
    assert peak(program(joint), products) == LAYERS * MIB


def test_where_nothing_fits_the_choice_comes_as_near_as_a_layer_needs() -> None:
    joint = layers()
    model = program(joint)
    own = {joint.key: joint.own}
    assert MIB < peak(model, chosen(model, MIB, own)) <= 6 * MIB


@pytest.mark.parametrize("budget", [12, 8])
def test_without_a_solved_program_a_search_finds_a_choice_within_the_budget(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = layers()
    model = program(joint)
    best = model.seconds(chosen(model, budget * MIB, {joint.key: joint.own}))
    monkeypatch.setattr(model, "_solve", lambda *_, **__: None)
    found = chosen(model, budget * MIB, {joint.key: joint.own})
    assert peak(model, found) <= budget * MIB
    assert model.seconds(found) <= 1.5 * best


def test_a_search_computes_nothing_again_that_would_not_be_the_same() -> None:
    joint = layers()
    values = [value._replace(can_redo=number % 4 != 3) for number, value in enumerate(joint.values)]
    joint = joint._replace(values=tuple(values))
    model = program(joint)
    drawn = frozenset(range(3, 2 * LAYERS, 4))
    assert drawn <= chosen(model, MIB, {joint.key: joint.own})[joint.key]


def test_what_may_become_one_kernel_is_saved_if_it_has_to_be() -> None:
    joint = layers()._replace(together=frozenset({0, 4}))
    model, budget = program(joint), 8 * MIB
    own = {joint.key: joint.own}
    free = chosen(model, budget, own)
    model.keeps = True
    kept = chosen(model, budget, own)
    assert joint.together <= kept[joint.key]
    assert not joint.together <= free[joint.key]
    assert peak(model, kept) <= budget


def ran(*levels: int) -> Simulated:
    """A run whose two products in backward end after these levels."""
    kernels = tuple(("mm", level) for level in levels)
    return Simulated((), 0, 2 * LAYERS * MIB, max(levels), (), kernels)


def test_the_model_is_corrected_where_the_code_needs_more_or_less() -> None:
    last = 2 * LAYERS - 1
    joint = layers()._replace(kernels=(("mm", LAYERS - 1), ("mm", last)))
    model, own = program(joint), {joint.key: joint.own}
    model.correct(own, ran(20 * MIB, 5 * MIB))
    assert [level / MIB for level in model.state(own).levels] == [20] * 8 + [5] * 8 + [16]


def test_a_run_of_more_kernels_of_a_name_corrects_all_moments_alike() -> None:
    joint = layers()._replace(kernels=(("mm", LAYERS - 1),))
    model, own = program(joint), {joint.key: joint.own}
    model.correct(own, ran(20 * MIB, 5 * MIB))
    assert [level / MIB for level in model.state(own).levels] == [*range(20, 4, -1), 16]


def test_a_micro_batch_does_not_hold_what_the_one_before_has_saved() -> None:
    joint = layers()
    calls, own = [joint, joint], {joint.key: joint.own}
    at_once = SavingProgram(calls, {joint.key: 0})
    events = [Event(0), Event(0, True), Event(1), Event(1, True)]
    one_by_one = SavingProgram(calls, {joint.key: 0}, events)
    assert peak(at_once, own) == 2 * peak(one_by_one, own) == 4 * LAYERS * MIB
