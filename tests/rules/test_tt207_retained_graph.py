from __future__ import annotations

from keeping import the_only_finding
from profiles import Step
from torchtrim.analysis.held import retained
from torchtrim.records.profile import Profile, SavedTensor


def test_a_graph_that_is_kept() -> None:
    found = the_only_finding("graph", "TT207")
    assert found.message.startswith("backward keeps the graph: ")


def saved_step(*, asked: int = 1, kept: int = 6) -> Profile:
    """Six activations that backward uses; so many of them stay until the step is over."""
    step = Step()
    made = [step.op("aten::mm", makes=1000) for _ in range(6)]
    for one in reversed(made):
        back = step.backward("aten::mm", one, one, makes=10)
        step.save(one, one, back)
        step.free(back)
    for one in made[kept:]:
        step.free(one)
    step.op("aten::sub_", phase="optimizer")
    step.saved = [
        SavedTensor(
            one.storage,
            one.dtype,
            one.shape,
            one.strides,
            one.offset,
            one.packed,
            one.unpacked,
            asked,
            one.saver,
        )
        for one in step.saved
    ]
    return step.profile()


def test_a_graph_that_is_asked_for_twice_is_needed() -> None:
    assert retained(saved_step())
    assert not retained(saved_step(asked=2))


def test_a_few_results_with_names_are_no_graph() -> None:
    assert not retained(saved_step(kept=2))
