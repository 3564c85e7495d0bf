from collections import Counter

import pytest

import keeping
from profiles import Made, Step, training_step
from torchtrim.analysis.peak import holders, peak_parts
from torchtrim.analysis.timeline import peak_operator
from torchtrim.analysis.why_live import (
    Zeroed,
    released_by_recompute,
    saved_storages,
    why_alive,
    zeroed_gradients,
)
from torchtrim.records.profile import Kind


def why(step: Step, storage: int, at: int) -> str:
    return why_alive(step.profile(), [storage], at)[storage]


def forward_and_loss(step: Step) -> tuple[Made, Made]:
    hidden = step.op("aten::addmm", makes=64)
    loss = step.op("aten::mse_loss", hidden, makes=4)
    return hidden, loss


def test_saved_for_backward_names_what_saved_it() -> None:
    step = Step()
    hidden = step.op("aten::gelu", makes=64)
    out = step.op("aten::addmm", hidden, makes=64)
    peak = step.backward("aten::ones_like", out)
    step.backward("aten::mm", out, hidden)
    assert why(step, hidden.out, peak.index) == "saved by matmul for backward"


def test_saved_by_several_names_the_one_that_releases_it() -> None:
    step = Step()
    hidden = step.op("aten::relu", makes=64)
    out = step.op("aten::addmm", hidden, makes=64)
    peak = step.backward("aten::mm", out, hidden)
    step.backward("aten::threshold_backward", hidden, hidden)
    assert why(step, hidden.out, peak.index) == "saved by ReLU for backward"


def test_a_backward_operator_of_unknown_forward_is_named_itself() -> None:
    step = Step()
    hidden, _ = forward_and_loss(step)
    peak = step.op("custom::backward", hidden, phase="backward")
    assert why(step, hidden.out, peak.index) == "saved for custom::backward in backward"


def test_recomputed_in_backward() -> None:
    step = Step()
    out = step.op("aten::addmm", makes=64)
    again = step.op("aten::addmm", makes=64, phase="recompute")
    peak = step.backward("aten::mm", out, again)
    assert why(step, again.out, peak.index) == "recomputed for backward of matmul"


def test_released_by_backward_without_being_read() -> None:
    step = Step()
    hidden, loss = forward_and_loss(step)
    peak = step.backward("aten::a", loss)
    step.free(hidden)
    step.backward("aten::b", loss)
    assert why(step, hidden.out, peak.index) == "released by backward without being read"


def test_released_by_backward_after_being_read() -> None:
    step = Step()
    hidden, loss = forward_and_loss(step)
    step.backward("aten::a", loss, hidden)
    later = step.backward("aten::b", loss)
    step.free(hidden)
    step.backward("aten::c", loss)
    assert why(step, hidden.out, later.index) == "released by backward after being read"


def test_held_by_a_python_reference_past_backward() -> None:
    step = Step()
    kept, loss = forward_and_loss(step)
    peak = step.backward("aten::mse_loss_backward", loss)
    step.op("aten::add_", phase="optimizer")
    assert why(step, kept.out, peak.index) == "held by a Python reference"


def test_what_dies_right_after_backward_is_not_said_to_be_released_by_it() -> None:
    step = Step()
    kept, loss = forward_and_loss(step)
    peak = step.backward("aten::mse_loss_backward", loss)
    step.free(kept)
    step.op("aten::add_", phase="optimizer")
    assert why(step, kept.out, peak.index) == "held by a Python reference"


def test_read_later_in_forward() -> None:
    step = Step()
    skip = step.op("aten::relu", makes=64)
    peak = step.op("aten::convolution", makes=64)
    step.op("aten::add", skip)
    assert why(step, skip.out, peak.index) == "read later by addition"


def test_read_at_the_peak_and_no_more() -> None:
    step = Step()
    source = step.op("aten::relu", makes=64)
    peak = step.op("aten::cat", source, makes=64)
    assert why(step, source.out, peak.index) == "being read by concatenation"
    assert why(step, peak.out, peak.index) == "being computed by concatenation"


def test_temporaries_of_backward_are_not_saved_activations() -> None:
    step = Step()
    _, loss = forward_and_loss(step)
    flow = step.backward("aten::mse_loss_backward", loss, makes=64)
    peak = step.backward("aten::expand", loss)
    step.backward("aten::mm", loss, flow)
    assert why(step, flow.out, peak.index) == "read later by matmul"


def test_alive_since_before_the_step_and_never_read() -> None:
    step = Step()
    old = step.alive("temporary", 64)
    leftover = step.alive("input", 64)
    peak = step.op("aten::relu", makes=1)
    assert why(step, old, peak.index) == "held by a Python reference since before the step"
    assert why(step, leftover, peak.index) == "held by the script from step to step"


def test_what_the_step_before_left_is_no_input_batch() -> None:
    """A graph whose saved tensors are kept lives until the variable of its loss gets the next one."""
    step = Step()
    graph = step.alive("input", 64)
    peak = step.op("aten::relu", makes=1)
    step.free(graph)
    step.op("aten::relu", makes=1)
    assert why(step, graph, peak.index) == "left by the step before"
    assert peak_parts(step.profile())[0].what == "left by the step before"


def test_an_input_batch_is_read() -> None:
    step = Step()
    batch = step.alive("input", 64)
    step.op("aten::relu", batch, makes=1)
    late = step.op("aten::relu", makes=1)
    assert why(step, batch, late.index) == "input batch"


def test_what_no_model_reads_is_no_input_batch() -> None:
    step = Step()
    data = step.alive("input", 64)
    step.op("aten::index", data, makes=1, phase="other")
    late = step.op("aten::relu", makes=1)
    assert why(step, data, late.index) == "held by the script from step to step"


@pytest.mark.slow
def test_an_average_of_the_parameters_is_called_so() -> None:
    profile = keeping.profile_of("average")
    kept = [h for h in holders(profile) if h.why == "average of the parameters"]
    assert len(kept) == 1
    assert kept[0].bytes == sum(s.bytes for s in profile.storages if s.kind == "parameter")
    assert any(one.what == "average of the parameters" for one in peak_parts(profile))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("parameter", "parameter"),
        ("buffer", "buffer"),
        ("optimizer_state", "optimizer state"),
        ("gradient", "gradient until zero_grad"),
    ],
)
def test_what_stays_is_named_by_its_kind(kind: Kind, words: str) -> None:
    step = Step()
    storage = step.alive(kind, 64)
    peak = step.op("aten::relu", storage)
    assert why(step, storage, peak.index) == words


def test_a_zeroed_gradient_is_told_apart_until_backward_adds_to_it() -> None:
    step = Step()
    gradient = step.alive("gradient", 64)
    zeroed = step.op("aten::zero_", gradient, mutates=(gradient,), phase="other")
    step.op("aten::add_", gradient, mutates=(gradient,), phase="backward")
    after = step.op("aten::norm", gradient)
    assert why(step, gradient, zeroed.index) == "zeroed gradient, not dropped"
    assert why(step, gradient, after.index) == "gradient until zero_grad"


@pytest.mark.parametrize(("graded", "words"), [(True, "kept by autograd"), (False, "held by")])
def test_inference_with_gradients_on_keeps_a_graph(graded: bool, words: str) -> None:
    step = Step()
    with step.module("net", graded=graded):
        hidden = step.op("aten::addmm", makes=64)
        step.op("aten::relu", hidden, makes=64)
        peak = step.op("aten::addmm", makes=64)
    assert why(step, hidden.out, peak.index).startswith(words)


def test_training_that_keeps_a_reference_is_not_said_to_lack_a_backward() -> None:
    step = Step()
    with step.module("net"):
        kept, loss = forward_and_loss(step)
    peak = step.backward("aten::a", loss)
    assert why(step, kept.out, peak.index) == "held by a Python reference"


def test_computed_by_the_first_operator() -> None:
    step = Step()
    made = step.op("aten::relu", makes=1)
    assert why(step, made.out, 0) == "being computed by ReLU"


def test_each_block_of_a_chain_keeps_its_inside_and_its_output() -> None:
    profile = training_step(blocks=3, size=10)
    end_of_forward = max(i for i, op in enumerate(profile.operators) if op.phase == "forward")
    saved = Counter[str]()
    for index in saved_storages(profile, end_of_forward):
        saved[profile.module_of(profile.storages[index].birth)] += profile.storages[index].counted
    assert saved == {"net.0": 40, "net.1": 40, "net.2": 40}


def test_recompute_releases_what_is_neither_input_nor_output() -> None:
    profile = training_step(blocks=3, size=10)
    blocks = [call for call in profile.calls if call.depth == 1]
    peak = peak_operator(profile)
    assert released_by_recompute(profile, blocks, peak) == [30, 30, 30]
    assert released_by_recompute(profile, blocks) == [30, 30, 30]


def test_an_outer_call_releases_what_its_inner_calls_keep() -> None:
    profile = training_step(blocks=3, size=10)
    root = [call for call in profile.calls if call.depth == 0]
    assert released_by_recompute(profile, root) == [3 * 40]


def test_only_what_backward_needs_is_saved() -> None:
    step = Step()
    weight = step.alive("parameter", 5)
    batch = step.alive("input", 5)
    held = step.op("aten::relu", weight, batch, makes=5)
    saved = step.op("aten::gelu", held, makes=5)
    loss = step.op("aten::mean", saved, makes=1, kind="temporary")
    peak = step.backward("aten::mean_backward", loss, makes=5)
    step.backward("aten::gelu_backward", saved, saved, weight, batch)
    assert saved_storages(step.profile(), peak.index) == [saved.out]


def test_nothing_is_saved_in_inference() -> None:
    step = Step()
    with step.module("net", graded=False):
        step.op("aten::relu", makes=5)
    assert saved_storages(step.profile()) == []


def test_what_the_peak_itself_reads_is_still_saved() -> None:
    step = Step()
    saved = step.op("aten::gelu", makes=5)
    peak = step.backward("aten::gelu_backward", saved, saved, makes=5)
    step.free(saved)
    assert saved_storages(step.profile(), peak.index) == [saved.out]


def test_an_input_made_in_the_step_is_no_activation() -> None:
    step = Step()
    batch = step.op("aten::stack", makes=5, kind="input", phase="other")
    out = step.op("aten::addmm", batch, makes=5)
    peak = step.backward("aten::mm", out, batch)
    assert saved_storages(step.profile(), peak.index) == []


def accumulating(step: Step, gradient: int) -> int:
    return step.op("aten::add_.Tensor", gradient, mutates=(gradient,), phase="backward").index


def zeroing(step: Step, *gradients: int, name: str = "aten::zero_") -> int:
    return step.op(name, *gradients, mutates=gradients, phase="other").index


def test_zero_from_the_zeroing_until_backward_adds() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    by = zeroing(step, gradient)
    step.op("aten::addmm")
    added = accumulating(step, gradient)
    step.op("aten::sgd", phase="optimizer")
    assert [*zeroed_gradients(step.profile())] == [Zeroed(gradient, by, by, added + 1, True)]


def test_zeroed_at_the_end_is_zero_at_the_start_of_the_next_step() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    step.op("aten::addmm")
    added = accumulating(step, gradient)
    by = zeroing(step, gradient)
    assert [*zeroed_gradients(step.profile())] == [
        Zeroed(gradient, by, by, by + 1, False),
        Zeroed(gradient, by, 0, added + 1, True),
    ]


def test_several_at_once_with_foreach() -> None:
    step = Step()
    gradients = [step.alive("gradient", 8) for _ in range(3)]
    zeroing(step, *gradients, name="aten::_foreach_zero_")
    found = zeroed_gradients(step.profile())
    assert {z.storage for z in found} == set(gradients)


def test_a_gradient_that_backward_never_reaches() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    zeroing(step, gradient)
    step.op("aten::addmm")
    assert not any(z.accumulated for z in zeroed_gradients(step.profile()))


def test_gradients_with_values_between_micro_batches_do_not_count() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    by = zeroing(step, gradient)
    first = accumulating(step, gradient)
    step.op("aten::addmm")
    accumulating(step, gradient)
    assert [*zeroed_gradients(step.profile())] == [Zeroed(gradient, by, by, first + 1, True)]


def test_zeros_that_backward_itself_writes_do_not_count() -> None:
    step = Step()
    made = step.op("aten::empty", makes=8, kind="gradient", phase="backward")
    step.op("aten::zero_", made, mutates=(made,), phase="backward")
    assert [*zeroed_gradients(step.profile())] == []


def test_zeroing_what_is_no_gradient_does_not_count() -> None:
    step = Step()
    zeroing(step, step.alive("buffer", 8))
    assert [*zeroed_gradients(step.profile())] == []


def test_a_gradient_of_this_step_is_not_zero_before_it_was_made() -> None:
    step = Step()
    gradient = step.op("aten::mm", makes=8, kind="gradient", phase="backward")
    by = step.op("aten::zero_", gradient, mutates=(gradient,), phase="other").index
    assert [*zeroed_gradients(step.profile())] == [Zeroed(gradient.out, by, by, by + 1, False)]


def test_a_gradient_dropped_later_is_zero_until_then() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    by = zeroing(step, gradient)
    step.op("aten::addmm")
    step.free(gradient)
    step.op("aten::addmm")
    assert [*zeroed_gradients(step.profile())] == [Zeroed(gradient, by, by, by + 2, False)]
