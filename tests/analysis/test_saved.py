from profiles import Step, training_step
from torchtrim.analysis.saved import released_by_recompute, saved_by_module, saved_storages
from torchtrim.analysis.timeline import peak_operator


def test_each_block_of_a_chain_keeps_its_inside_and_its_output() -> None:
    profile = training_step(blocks=3, size=10)
    end_of_forward = max(i for i, op in enumerate(profile.operators) if op.phase == "forward")
    saved = saved_by_module(profile, end_of_forward)
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
    assert saved_by_module(step.profile()) == {}


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
