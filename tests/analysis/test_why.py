import pytest

from profiles import Made, Step
from torchtrim.analysis.why_live import why_alive
from torchtrim.records.profile import Kind


def why(step: Step, storage: int, at: int) -> str:
    return why_alive(step.profile(), [storage], at)[storage]


def forward_and_loss(step: Step) -> tuple[Made, Made]:
    hidden = step.op("aten::addmm", makes=64)
    loss = step.op("aten::mse_loss", hidden, makes=4)
    return hidden, loss


def test_saved_for_backward_names_the_forward_operator_that_saved_it() -> None:
    step = Step()
    hidden = step.op("aten::gelu", makes=64)
    out = step.op("aten::addmm", hidden, makes=64)
    peak = step.backward("aten::ones_like", out)
    step.backward("aten::mm", out, hidden)
    assert why(step, hidden.out, peak.index) == "saved for backward of aten::addmm"


def test_saved_by_several_names_the_one_that_releases_it() -> None:
    step = Step()
    hidden = step.op("aten::relu", makes=64)
    out = step.op("aten::addmm", hidden, makes=64)
    peak = step.backward("aten::mm", out, hidden)
    step.backward("aten::threshold_backward", hidden, hidden)
    assert why(step, hidden.out, peak.index) == "saved for backward of aten::relu"


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
    assert why(step, again.out, peak.index) == "recomputed for backward of aten::addmm"


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
    assert why(step, skip.out, peak.index) == "read later by aten::add"


def test_read_at_the_peak_and_no_more() -> None:
    step = Step()
    source = step.op("aten::relu", makes=64)
    peak = step.op("aten::cat", source, makes=64)
    assert why(step, source.out, peak.index) == "being read by aten::cat"
    assert why(step, peak.out, peak.index) == "being computed by aten::cat"


def test_temporaries_of_backward_are_not_saved_activations() -> None:
    step = Step()
    _, loss = forward_and_loss(step)
    flow = step.backward("aten::mse_loss_backward", loss, makes=64)
    peak = step.backward("aten::expand", loss)
    step.backward("aten::mm", loss, flow)
    assert why(step, flow.out, peak.index) == "read later by aten::mm"


def test_alive_since_before_the_step_and_never_read() -> None:
    step = Step()
    old = step.alive("temporary", 64)
    leftover = step.alive("input", 64)
    peak = step.op("aten::relu", makes=1)
    assert why(step, old, peak.index) == "held by a Python reference since before the step"
    assert why(step, leftover, peak.index) == "held by a Python reference since before the step"


def test_an_input_batch_is_read() -> None:
    step = Step()
    batch = step.alive("input", 64)
    step.op("aten::relu", batch, makes=1)
    late = step.op("aten::relu", makes=1)
    assert why(step, batch, late.index) == "input batch"


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
    assert why(step, made.out, 0) == "being computed by aten::relu"
