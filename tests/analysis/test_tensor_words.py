"""What a tensor is, in a word."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from profiles import Step, use
from torchtrim.analysis.tensor_words import what_is
from torchtrim.records.operator_names import word_of


def test_attention_is_named_from_scores_to_weights() -> None:
    step = Step()
    scores = step.op("aten::bmm", makes=64)
    scaled = step.op("aten::div", scores, makes=64)
    weights = step.op("aten::_softmax", scaled, makes=64)
    step.op("aten::bmm", weights, makes=64)
    profile = step.profile()
    words = [what_is(profile, one.out) for one in (scores, scaled, weights)]
    assert words == ["attention scores", "attention scores", "attention weights"]


def test_logits_are_what_a_loss_reads_directly_or_in_another_type() -> None:
    step = Step()
    hidden = step.op("aten::addmm", makes=64)
    logits = step.op("aten::addmm", hidden, makes=64)
    wide = step.op("aten::_to_copy", logits, makes=128)
    logs = step.op("aten::_log_softmax", wide, makes=128)
    step.op("aten::nll_loss_forward", logs, makes=4)
    profile = step.profile()
    words = [what_is(profile, one.out) for one in (hidden, logits, wide, logs)]
    assert words == ["output of matmul", "logits", "logits", "log-probabilities"]


def test_further_outputs_have_names_of_their_own() -> None:
    step = Step()
    norm = step.op("aten::native_batch_norm", makes=(64, 4, 4))
    mask = step.op("aten::native_dropout", norm, makes=(64, 16))
    profile = step.profile()
    words = [what_is(profile, one) for one in (*norm.storages[:2], *mask.storages)]
    assert words == [
        "normalized input",
        "statistics of BatchNorm",
        "output of dropout",
        "dropout mask",
    ]


def test_a_scalar_outside_modules_is_the_loss_and_a_large_result_is_not() -> None:
    step = Step()
    large = step.op("aten::mul", makes=64)
    loss = step.op("aten::mean", large, makes=4)
    step.operators[-1] = replace(step.operators[-1], outputs=(use(loss.out, shape=()),))
    profile = step.profile()
    assert what_is(profile, loss.out) == "loss"
    assert what_is(profile, large.out) == "output of multiplication"


def test_no_word_is_invented() -> None:
    step = Step()
    batch = step.alive("input", 8)
    odd = step.op("custom::thing", batch, makes=8)
    flow = step.backward("aten::mul", odd, makes=8)
    profile = step.profile()
    words = [what_is(profile, one) for one in (batch, odd.out, flow.out)]
    assert words == ["", "", "gradient of an activation"]


@pytest.mark.parametrize(
    ("operator", "word"),
    [
        ("aten::native_batch_norm.default", "BatchNorm"),
        ("aten::cudnn_batch_norm", "BatchNorm"),
        ("aten::relu_.default", "ReLU"),
        ("aten::threshold_backward.default", "backward of ReLU"),
        ("aten::_softmax_backward_data", "backward of softmax"),
        ("aten::index_put_.default", "aten::index_put_"),
        ("mine::relu", "mine::relu"),
    ],
)
def test_words_of_operators(operator: str, word: str) -> None:
    assert word_of(operator) == word
