"""The choice of what compiled graphs save, on graphs that no program made."""

from __future__ import annotations

import pytest

from torchtrim.compiled import choose
from torchtrim.compiled.choose import SavingProgram
from torchtrim.compiled.joint import Joint, Value

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


@pytest.fixture(autouse=True)
def _fine_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_FEW", 1)


def test_what_is_saved_by_itself_needs_its_bytes_and_no_time() -> None:
    joint = layers()
    model = program(joint)
    assert model.peak({joint.key: joint.own}) == 2 * LAYERS * MIB
    assert model.seconds({joint.key: joint.own}) == 0


@pytest.mark.parametrize("budget", [12, 8])
def test_a_choice_fits_its_budget_and_takes_no_more_time_than_a_larger_one(budget: int) -> None:
    joint = layers()
    model = program(joint)
    tight, loose = model.choose(budget * MIB, 5.0), model.choose(2 * LAYERS * MIB, 5.0)
    assert tight is not None
    assert loose is not None
    assert model.peak(tight) <= budget * MIB
    assert model.seconds(loose) == 0 < model.seconds(tight)


def test_what_is_computed_again_late_is_not_held_from_the_start() -> None:
    joint = layers()
    model = program(joint)
    # Each second product is saved: two layers at most are computed again at a time.
    saved = {joint.key: frozenset(range(1, 2 * LAYERS, 4))}
    assert model.peak(saved) <= (LAYERS // 2 + 4) * MIB
    assert model.seconds(saved) == pytest.approx(LAYERS * 1e-3 + LAYERS / 2 * 1e-2)


def test_a_fused_value_takes_no_memory_when_it_is_computed_again() -> None:
    joint = layers(whole=False)
    products = {joint.key: frozenset(range(1, 2 * LAYERS, 2))}
    assert program(joint).peak(products) == LAYERS * MIB


def test_nothing_fits_into_less_than_one_layer_needs() -> None:
    assert program(layers()).choose(MIB, 5.0) is None


def test_what_a_kernel_allocates_counts_where_it_runs() -> None:
    joint = layers()._replace(kernels=(("mm", 0), ("mm", 2 * LAYERS - 1)))
    own = {joint.key: joint.own}
    for first, last, more in ((0, 5, 0), (5, 0, 5)):  # at the last, little is still saved
        kernels = {joint.key: (("mm", first * MIB), ("mm", last * MIB))}
        model = SavingProgram([joint], {joint.key: 0}, kernels)
        assert model.peak(own) == (2 * LAYERS + more) * MIB
