"""Norms, recurrent layers, convolutions and optimizers on emulated devices, beside attention.

Each case names the line that decides its operator, or what it saves: `deriv` is
`tools/autograd/derivatives.yaml` and `native` `native_functions.yaml`, both at v2.13.0; `norm`, `rnn` and
`props` are `Normalization.cpp`, `cudnn/RNN.cpp` and `TensorProperties.cpp` of ATen at release 2.4;
`optim` is `torch/optim/optimizer.py` at v2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrim.capture.recording import record_call
from torchtrim.dryrun.run import dry_run
from torchtrim.emulator import emulate
from torchtrim.emulator.norms import SOURCES as NORM_SOURCES
from torchtrim.emulator.recurrent import SOURCES as LAYER_SOURCES
from torchtrim.emulator.runtime import model_named

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICES = ("v100", "a100", "h100")
Made = Callable[[], nn.Module]


class Case(NamedTuple):
    """A module and its input, the operator that a GPU runs for it, and tensors it saves by name."""

    line: str
    make: Made
    shape: tuple[int, ...]
    operator: str
    saved: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    dtype: torch.dtype = SINGLE
    last: bool = False
    trains: bool = True


def normed(channels: int, **options: Any) -> Made:
    return lambda: nn.BatchNorm2d(channels, **options)


STATISTICS = {"result1": (SINGLE, (6,)), "result2": (SINGLE, (6,)), "result3": (torch.uint8, (0,))}
NO_STATISTICS = {name: (dtype, (0,)) for name, (dtype, _) in STATISTICS.items()}
ROOTS = {"result1": (SINGLE, (3, 5, 1))}
# Reserves are estimates: (gates + 2) x hidden x positions x directions x bytes.
CASES = (
    Case("norm 487", normed(6), (4, 6, 5, 5), "cudnn_batch_norm", STATISTICS),
    Case("norm 487", normed(6), (4, 6, 5, 5), "cudnn_batch_norm", STATISTICS, last=True),
    Case(*("deriv 2773", normed(6), (4, 6, 5, 5), "cudnn_batch_norm", NO_STATISTICS), trains=False),
    Case("norm 493: no bfloat16", normed(6), (4, 6, 5, 5), "native_batch_norm", {}, BRAIN),
    Case("norm 496: affine", normed(6, affine=False), (4, 6, 5, 5), "native_batch_norm", {}),
    Case("norm 499", lambda: nn.BatchNorm1d(6), (4, 6), "native_batch_norm", {}),
    Case("norm 499", lambda: nn.BatchNorm1d(6), (4, 6, 9), "cudnn_batch_norm", STATISTICS),
    Case("norm 499", lambda: nn.BatchNorm3d(6), (4, 6, 2, 3, 4), "cudnn_batch_norm", STATISTICS),
    Case("deriv 1284", lambda: nn.RMSNorm(16), (3, 5, 16), "_fused_rms_norm", ROOTS),
    Case("deriv 1284", lambda: nn.RMSNorm(16), (3, 5, 16), "_fused_rms_norm", ROOTS, BRAIN),
    Case("native 3231", lambda: nn.LayerNorm(16), (3, 5, 16), "native_layer_norm", ROOTS),
    Case("native 2897", lambda: nn.GroupNorm(2, 6), (4, 6, 5), "native_group_norm", {}),
    Case(
        *("rnn 1571", lambda: nn.LSTM(6, 4), (5, 7, 6), "_cudnn_rnn"),
        {"result3": (torch.uint8, (6 * 4 * 35 * 4,)), "result0": (SINGLE, (5, 7, 4))},
    ),
    Case(
        *("rnn 1571", lambda: nn.GRU(6, 4, 2, bidirectional=True), (5, 7, 6), "_cudnn_rnn"),
        {"result3": (torch.uint8, (5 * 4 * 35 * 4 * 4,)), "result0": (SINGLE, (5, 7, 8))},
    ),
    Case(
        *("rnn 1571", lambda: nn.RNN(6, 4), (5, 7, 6), "_cudnn_rnn"),
        {"result3": (torch.uint8, (3 * 4 * 35 * 8,))},
        DOUBLE,
    ),
    Case("props 85: no bfloat16", lambda: nn.GRU(6, 4), (5, 7, 6), "!_cudnn_rnn", {}, BRAIN),
    Case("native 1662", lambda: nn.Conv2d(6, 4, 3), (2, 6, 5, 5), "convolution", {}),
    Case("native 1662", lambda: nn.Conv1d(6, 4, 3), (2, 6, 5), "convolution", {}, BRAIN),
    Case(
        *("native 267", lambda: nn.Dropout(0.5), (4, 6), "native_dropout"),
        {"result1": (torch.bool, (4, 6))},
    ),
)


def _ran(case: Case, place: str) -> tuple[list[Tensor], Any]:
    """Output, gradients and buffers of a case after a step, and the node that made the output."""
    torch.manual_seed(0)
    module = case.make().to(case.dtype).to(place).train(case.trains)
    x = torch.randn(case.shape).to(case.dtype)
    x = x.to(memory_format=torch.channels_last) if case.last else x
    x = x.to(place).requires_grad_()
    torch.manual_seed(1)
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    node = y.grad_fn
    y.square().sum().backward(retain_graph=True)
    gradients = [one.grad for one in (x, *module.parameters())]
    made = [y.detach(), *(one for one in gradients if one is not None), *module.buffers()]
    return [one.cpu() for one in made], node


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=[f"{one.line} {one.operator}" for one in CASES])
def test_the_operator_and_what_it_saves_are_the_sources(case: Case, device: str) -> None:
    with emulate(model_named(device)):
        profile = record_call(lambda: _ran(case, "cuda"), device="emulated")
        found, node = _ran(case, "cuda")
        names = {op.name.partition(".")[0].removeprefix("aten::") for op in profile.operators}
        wanted = case.operator.removeprefix("!")
        assert (wanted in names) == (wanted == case.operator)
        for name, (dtype, shape) in case.saved.items():
            tensor = getattr(node, f"_saved_{name}")
            assert (tensor.dtype, tuple(tensor.shape), tensor.is_cuda) == (dtype, shape, True)
        expected, _ = _ran(case, "cpu")
    assert all(map(torch.equal, found, expected))


def test_mean_and_deviation_of_a_layer_norm_have_the_shape_of_rows() -> None:
    with emulate(model_named("a100")):
        x = torch.randn(3, 5, 16, device="cuda", requires_grad=True)
        node: Any = F.layer_norm(x, (16,)).grad_fn
        assert node._saved_result1.shape == node._saved_result2.shape == (3, 5, 1)


@pytest.mark.parametrize(
    ("options", "operator"),
    [
        ({}, "_foreach_addcdiv_"),  # optim 45: `_default_to_fused_or_foreach` on CUDA
        ({"foreach": False}, "addcdiv_"),
        ({"fused": True}, "_fused_adamw_"),  # native 15732
    ],
)
def test_an_optimizer_takes_all_parameters_at_once(options: dict[str, Any], operator: str) -> None:
    with emulate(model_named("a100")):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), **options)

        def step() -> None:
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            optimizer.step()

        profile = record_call(step, device="emulated")
    names = {op.name.partition(".")[0].removeprefix("aten::") for op in profile.operators}
    assert operator in names


def test_an_embedding_learns_by_the_dense_operator() -> None:
    """native 2246."""
    with emulate(model_named("a100")):
        table = nn.Embedding(9, 4).cuda()
        words = torch.tensor([1, 2, 2], device="cuda")
        profile = record_call(lambda: table(words).sum().backward(), device="emulated")
    assert any("embedding_dense_backward" in op.name for op in profile.operators)


def test_backward_of_an_evaluated_layer_is_refused_as_by_cudnn() -> None:
    with emulate(model_named("a100")):
        layer = nn.GRU(3, 2).cuda().eval()
        out, _ = layer(torch.randn(4, 2, 3, device="cuda"))
        with pytest.raises(RuntimeError, match="can only be called in training mode"):
            out.sum().backward()


def test_a_packed_sequence_runs_in_cudnn() -> None:
    results = []
    for place in ("cpu", "cuda"):
        with emulate(model_named("a100")):
            torch.manual_seed(0)
            layer = nn.LSTM(6, 4, 2, dropout=0.3, bidirectional=True).to(place)
            x = torch.randn(5, 3, 6).to(place).requires_grad_()
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 1]))
            out = layer(packed)[0].data
            assert ("Cudnn" in out.grad_fn.name()) == (place == "cuda")
            out.square().sum().backward()
            assert x.grad is not None
            results.append([out.detach().cpu(), x.grad.cpu()])
    assert all(map(torch.equal, *results))


STEPS: dict[str, Callable[[], Tensor]] = {
    "lstm": lambda: nn.LSTM(6, 4, 2).cuda()(torch.randn(5, 3, 6, device="cuda"))[0],
    "gru": lambda: nn.GRU(6, 4).cuda()(torch.randn(5, 3, 6, device="cuda"))[0],
    "batch norm": lambda: nn.BatchNorm2d(6).cuda()(torch.randn(4, 6, 5, 5, device="cuda")),
    "rms norm": lambda: nn.RMSNorm(16).cuda()(torch.randn(3, 16, device="cuda")),
    "flash": lambda: _attended(BRAIN),
    "efficient": lambda: _attended(SINGLE),
    "math": lambda: _attended(DOUBLE),
    "dropout": lambda: _attended(SINGLE, dropout_p=0.5),
}


def _attended(dtype: torch.dtype, **options: Any) -> Tensor:
    x = torch.randn(2, 2, 24, 8, device="cuda", dtype=dtype, requires_grad=True)
    return F.scaled_dot_product_attention(x, x, x, **options)


@pytest.mark.parametrize("device", ["a100", "h100"])
@pytest.mark.parametrize("name", STEPS)
def test_a_dry_run_has_the_operators_and_bytes_of_a_run(name: str, device: str) -> None:
    def step() -> None:
        STEPS[name]().float().sum().backward()

    def recorded() -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
        profile = record_call(step, device="emulated")
        return [
            (op.name, tuple(one.shape for one in op.outputs))
            for op in profile.operators
            if any(word in op.name for word in ("rnn", "norm", "attention", "softmax"))
        ]

    with emulate(model_named(device)):
        run = recorded()
        with dry_run(".", owned_only=True):
            dry = recorded()
    assert run == dry
    assert len(run) >= 2


def test_each_source_names_a_line() -> None:
    assert all(one.line > 0 and one.note for one in (*NORM_SOURCES, *LAYER_SOURCES))
