"""The words of a plan: places, figures, and what older plans lack."""

from __future__ import annotations

import msgspec

from report import samples
from torchtrim.records.plan import PredictedEffect, Technique
from torchtrim.report.plan_words import plan_lines, words_of

TYPES = {"Net.a": "ReLU", "Net.b": "ReLU", "Net.head": "Linear"}


def of(name: str, *where: str, **more: object) -> str:
    return words_of(Technique(name=name, where=where, **more), TYPES)


def test_modules_of_one_type_are_counted() -> None:
    assert of("overwrite", "Net.a", "Net.b") == "write results over inputs (overwrite, 2 ReLU)"


def test_one_module_is_named_with_its_type() -> None:
    assert of("chunked_loss", "Net.head", equivalence="ROUNDING", options={"rows": 64}) == (
        "compute logits and loss in chunks of rows "
        "(chunked_loss, ROUNDING, rows 64, Net.head, Linear)"
    )


def test_a_part_of_a_chain_keeps_its_bounds() -> None:
    assert of("recompute", "Net.a[0:2]").endswith("(recompute, Net.a[0:2])")


def test_places_of_operators_are_named_by_their_module() -> None:
    assert of("replay", "Net:relu.0,add.1", "Net.a:relu.0").endswith(
        "(replay, 2 places of Net, Net.a)"
    )


def effects(*figures: tuple[int, float]) -> list[str]:
    (technique,) = samples.PLAN.techniques[:1]
    predicted = msgspec.structs.replace(
        samples.PLAN.predicted,
        effects=tuple(
            PredictedEffect(technique=technique.name, saved_bytes=size, added_seconds=seconds)
            for size, seconds in figures
        ),
    )
    plan = msgspec.structs.replace(
        samples.PLAN,
        techniques=(technique,) * len(figures),
        words=("one", "two")[: len(figures)],
        predicted=predicted,
    )
    return plan_lines(msgspec.structs.replace(samples.OPTIMIZE, plan=plan))


def test_each_technique_has_its_figures_in_order() -> None:
    assert effects((48 * samples.MIB, 0.0), (-samples.MIB, 0.02)) == [
        "-48.0 MiB, free: one",
        "+1.00 MiB, +20.0 ms: two",
    ]


def test_a_technique_that_saves_nothing_at_the_peak_says_so() -> None:
    assert effects((0, 0.0)) == ["peak unchanged, free: one"]


def test_a_plan_without_words_names_its_places() -> None:
    assert "modules: model.encoder.layers.0-3" in plan_lines(samples.OPTIMIZE)[0]
