"""Workspaces against the allocator's own events, an operator at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.attention import RelativeAttention, get_rpe_config
from torchtrim.dispatch.modes import tensors_among
from torchtrim.dryrun import workspace as table
from torchtrim.dryrun.run import dry_run
from torchtrim.dryrun.workspace import Machine, workspace
from torchtrim.emulator.device import emulate
from torchtrim.emulator.runtime import model_named

aten = torch.ops.aten
SLACK = 16_384
"""Bytes that are not told apart: tables of indices, padding of buffers."""
SAMPLES = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of this machine is measured now."""
    here = Machine("here", None)
    monkeypatch.setattr(table, "machine", lambda: here)


def needed(call: Callable[[], Any]) -> tuple[int, Any]:
    """`(bytes that a call needs beside its results, the results)`; the second call is measured."""
    call()
    with profile(profile_memory=True) as seen:
        result = call()
    events: Any = seen.kineto_results
    level = highest = 0
    for event in events.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    storages = {one.untyped_storage() for one in tensors_among((result,))}
    return highest - sum(one.nbytes() for one in storages), result


def check(operator: Any, *args: Any) -> None:
    """What is told is within 5 % of the bytes that are touched."""
    found, result = needed(lambda: operator(*args))
    touched = sum(one.nbytes for one in tensors_among((*args, result)))
    told = workspace(operator, args, {}, result)
    assert told is not None
    assert abs(told - found) <= 0.05 * (touched + found) + SLACK


def convolved(x: Any, w: Any, args: tuple[Any, ...]) -> None:
    """A convolution, with a bias and without, and both of its gradients."""
    check(aten.convolution.default, x, w, None, *args)
    check(aten.convolution.default, x, w, torch.randn(w.shape[1 if args[3] else 0]), *args)
    gradient = torch.randn_like(aten.convolution.default(x, w, None, *args))
    check(aten.convolution_backward.default, gradient, x, w, None, *args, [True, True, False])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("inner", [1, 3, 8, 12, 16, 24, 32])
@pytest.mark.parametrize("outer", [3, 8, 24, 32])
def test_convolutions_of_few_channels(inner: int, outer: int, stride: int) -> None:
    x, w = torch.randn(SAMPLES, inner, 32, 32), torch.randn(outer, inner, 3, 3)
    convolved(x, w, ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1))


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize(
    ("inner", "outer"), [(24, 3), (16, 8), (8, 8), (3, 24), (32, 32), (20, 40)]
)
def test_transposed_convolutions(inner: int, outer: int, size: int, stride: int) -> None:
    x, w = torch.randn(SAMPLES, inner, 32, 32), torch.randn(inner, outer, size, size)
    convolved(x, w, ([stride] * 2, [(size - 1) // 2] * 2, [1, 1], True, [0, 0], 1))


@pytest.mark.parametrize("dilation", [2, 4, 12, 18])
@pytest.mark.parametrize("side", [8, 16, 32])
def test_dilated_convolutions_on_small_maps(side: int, dilation: int) -> None:
    x, w = torch.randn(SAMPLES, 64, side, side), torch.randn(32, 64, 3, 3)
    found = [dilation] * 2
    gradient = torch.randn(SAMPLES, 32, side, side)
    rest = (None, [1, 1], found, found, False, [0, 0], 1, [True, True, False])
    check(aten.convolution_backward.default, gradient, x, w, *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inner", "outer", "size"), [(16, 32, 3), (32, 8, 1)])
def test_convolutions_in_half_precision(
    inner: int, outer: int, size: int, dtype: torch.dtype
) -> None:
    x = torch.randn(SAMPLES, inner, 12, 12, dtype=dtype)
    w = torch.randn(outer, inner, size, size, dtype=dtype)
    around = [size // 2] * 2
    check(aten.convolution.default, x, w, None, [1, 1], around, [1, 1], False, [0, 0], 1)
    gradient = torch.randn(SAMPLES, outer, 12, 12, dtype=dtype)
    rest = (None, [1, 1], around, [1, 1], False, [0, 0], 1, [True, True, False])
    check(aten.convolution_backward.default, gradient, x, w, *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(64, 96), (400, 700)])
def test_products(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(rows, columns, dtype=dtype), torch.randn(columns, 80, dtype=dtype)
    check(aten.mm.default, x, w)
    check(aten.addmm.default, torch.randn(80, dtype=dtype), x, w)


LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", [*LOSSES, F.soft_margin_loss, F.binary_cross_entropy])
def test_losses(loss: Any, reduction: str) -> None:
    x, y = torch.rand(200, 300), torch.rand(200, 300)
    if loss in LOSSES:
        number = {"none": 0, "mean": 1, "sum": 2}[reduction]
        given = (None, None) if loss is F.binary_cross_entropy_with_logits else ()
        operator = getattr(aten, loss.__name__).default
        check(operator, x, y, *given, number)
    with dry_run(".", owned_only=True):
        told = loss(x * 1, y, reduction=reduction)
    real = loss(x * 1, y, reduction=reduction)
    assert told.shape == real.shape
    assert told.untyped_storage().nbytes() == real.untyped_storage().nbytes()


@pytest.mark.parametrize("size", [60, 96, 200])
@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_interpolation(mode: str, channels: int, size: int) -> None:
    x, to = torch.randn(2, channels, 48, 48), [size, size]
    given = (x, to, False) if mode == "bilinear" else (x, to)
    check(getattr(aten, f"upsample_{mode}2d").default, *given)


_ROWS = (64, 512)
_COMPOSITES = {
    "bilinear": lambda x: F.bilinear(x, x, torch.rand(24, 512, 512)),
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "complex fft": lambda x: torch.fft.fft(x).real,
    "sort": lambda x: x.sort(-1).values,
    "kthvalue": lambda x: x.kthvalue(3).values,
    "dist": lambda x: torch.dist(x, 2 * x),
    "soft margins": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "group norm": lambda x: F.group_norm(x, 8, torch.ones(512), torch.zeros(512)),
    "dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "scatter": lambda x: torch.zeros(_ROWS).scatter(0, torch.zeros(_ROWS, dtype=torch.long), x),
    "linear": lambda x: F.interpolate(x[None], scale_factor=3, mode="linear"),
    "bicubic": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bicubic"),
    "antialias": lambda x: F.interpolate(
        x[None, None], scale_factor=0.5, mode="bilinear", antialias=True
    ),
}


@pytest.mark.parametrize("name", _COMPOSITES)
def test_the_peak_of_kernels_that_call_others_is_told(name: str) -> None:
    calls = _Calls("aten")
    x = torch.rand(_ROWS, requires_grad=True)
    with calls:
        _COMPOSITES[name](x).sum().backward()
    assert calls.checked


class _Calls(TorchDispatchMode):
    """Checks each call of a library's operators that returns new tensors."""

    def __init__(self, library: str = "torchtrim") -> None:
        super().__init__()
        self._library = library
        self.checked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh = not func._schema.is_mutable and all(
            r.alias_info is None for r in func._schema.returns
        )
        if func.namespace == self._library and fresh and not kwargs:
            check(func, *args)
            self.checked += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("on", ["k", "v", "qkv"])
@pytest.mark.parametrize(("side", "skip"), [(8, 0), (12, 0), (14, 1), (28, 0)])
def test_relative_attention(side: int, skip: int, on: str) -> None:
    pytest.importorskip("numba")
    module = RelativeAttention(64, 2, True, rpe_config=get_rpe_config(rpe_on=on, skip=skip))
    x = torch.randn(2, side * side + skip, 64, requires_grad=True)
    with _Calls() as calls:
        module(x, height=side, width=side).sum().backward()
    assert calls.checked == 2


@pytest.mark.parametrize("training", [True, False])
def test_lstm(training: bool) -> None:
    layer = torch.nn.LSTM(24, 40)
    x = torch.randn(9, SAMPLES, 24)
    x.requires_grad_(training)
    checked = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "rnn_layer" in func.name():
                check(func, *args)
                checked.append(func)
            return func(*args, **(kwargs or {}))

    with torch.set_grad_enabled(training), Calls():
        result = layer(x)[0]
        if training:
            result.sum().backward()
    assert len(checked) == 1 + training


@pytest.mark.parametrize("heads", [1, 4])
def test_attention(heads: int) -> None:
    query, key, value = torch.randn(3, 2, heads, 300, 16)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    check(forward, query, key, value)
    result, logsumexp = forward(query, key, value)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    check(backward, torch.ones_like(result), query, key, value, result, logsumexp, 0.0, False)


def test_a_call_is_run_once_and_changes_nothing_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []
    monkeypatch.setattr(table, "needed", lambda call: ran.append(call()) or 7)
    x = torch.randn(4, 6)
    state = torch.get_rng_state()
    with dry_run(".", owned_only=True) as dry, torch.no_grad():
        for _ in range(2):
            torch.native_dropout(x.repeat(9, 9), 0.5, True)
        assert not torch.is_grad_enabled()
        assert dry.take_workspace() == 7
    assert len(ran) == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("limit", ["_MOST_BYTES", "_MOST_FLOPS"])
def test_a_call_that_is_too_large_is_not_run_and_is_named(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, limit, 1000)
    monkeypatch.setattr(table, "needed", lambda call: pytest.fail("was run"))
    with dry_run(".", owned_only=True) as dry:
        torch.nn.Conv2d(16, 8, 3)(torch.empty(5, 16, 32, 32))
        assert dry.take_workspace() == 0
    (note,) = dry.guesses.notes()
    assert "scratch of aten::convolution is not counted" in note


@pytest.mark.parametrize("error", [RuntimeError, IndexError, ZeroDivisionError, MemoryError])
def test_an_operator_that_raises_on_zeros_counts_nothing_and_is_named(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def raises(call: Callable[[], Any]) -> int:
        tries.append(torch.rand(3))
        raise error("not on zeros")

    monkeypatch.setattr(table, "needed", raises)
    state = torch.get_rng_state()
    with dry_run(".", owned_only=True) as dry, torch.no_grad():
        for _ in range(2):
            assert torch.roll(torch.empty(90, 40), 1).shape == (90, 40)
        assert not torch.is_grad_enabled()
        assert dry.take_workspace() == 0
    assert len(tries) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32
    (note,) = dry.guesses.notes()
    assert "scratch of aten::roll is not counted" in note


def test_a_real_kernel_that_refuses_its_arguments_is_no_error() -> None:
    x, w = torch.empty(8, 4, 9, 9), torch.empty(8, 5, 9, 9)
    args = (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert table._tried(aten.convolution.default, "aten::convolution", args, {}) is None


def test_attention_over_a_long_sequence_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "needed", lambda call: pytest.fail("was run"))
    x, width = torch.empty(1, 100_000, 64, device="meta"), torch.empty(192, 64, device="meta")
    args = (x, x, x, 64, 4, width, width[:, 0], width[:64], width[0])
    assert workspace(aten._native_multi_head_attention.default, args, {}, x) is None


def test_a_trial_ignores_and_keeps_the_programs_defaults() -> None:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
            x = torch.empty(5, 16, 12, 12, dtype=torch.float32, device="cpu")
            w = torch.empty(8, 16, 3, 3, dtype=torch.float32, device="cpu")
            rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
            assert table._tried(aten.convolution.default, "aten::convolution", (x, w, *rest), {})
            assert torch.get_default_dtype() is torch.float64
            assert torch.get_default_device() == torch.device("meta")
            assert torch.is_autocast_enabled("cpu")
            assert torch.is_inference_mode_enabled()
    finally:
        torch.set_default_dtype(dtype)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()


def test_kernels_of_the_cpu_are_not_run_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "needed", lambda call: pytest.fail("was run"))
    with emulate(model_named("h100")), dry_run(".", owned_only=True):
        torch.nn.Conv2d(16, 8, 3, device="cuda")(torch.empty(5, 16, 32, 32, device="cuda"))
