from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrim.emulator import emulate
from torchtrim.emulator.autocast import (
    LOW_ON_BOTH,
    TO_FLOAT,
    TO_FLOAT_IF_UNSAID,
    TO_LOW,
    TO_WIDEST,
)

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
LOW, FULL = torch.bfloat16, torch.float32


def listed(macro: str) -> set[str]:
    """The operators in a macro of the header, with their overloads."""
    text = re.sub(r"//.*|\\\n", " ", HEADER.read_text())
    body = text.split(f"#define {macro}(_)")[1].split("#")[0]
    found = re.findall(r"_\(\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)", body)
    return {f"{name}.{overload}" if overload else name for name, overload in found}


def test_the_lists_are_torchs() -> None:
    norms = {"norm.Scalar", "norm.ScalarOpt_dim"}
    assert set(TO_FLOAT) == listed("AT_FORALL_FP32") | norms
    assert set(TO_FLOAT_IF_UNSAID) == listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    assert set(TO_WIDEST) == listed("AT_FORALL_PROMOTE")
    assert set(TO_LOW) < listed("AT_FORALL_LOWER_PRECISION_FP")
    assert {name.partition(".")[0] for name in LOW_ON_BOTH} < {
        name.partition(".")[0] for name in listed("AT_FORALL_LOWER_PRECISION_FP")
    }
    assert all(f'"{name}"' in HEADER.read_text() for name in norms)


def x(*shape: int) -> Tensor:
    return torch.rand(shape or (4, 4), device="cuda")


def low(*shape: int) -> Tensor:
    return x(*shape).to(LOW)


def module(make: Callable[..., Any], *sizes: Any) -> Any:
    return make(*sizes).cuda()


DTYPES: dict[str, tuple[Callable[[], Tensor], torch.dtype]] = {
    "linear": (lambda: module(nn.Linear, 4, 4)(x()), LOW),
    "matmul": (lambda: x() @ x(), LOW),
    "mv": (lambda: x() @ x(4), LOW),
    "bmm": (lambda: torch.bmm(x(1, 4, 4), x(1, 4, 4)), LOW),
    "einsum": (lambda: torch.einsum("ij,jk->ik", x(), x()), LOW),
    "addmm": (lambda: torch.addmm(x(), x(), x()), LOW),
    "baddbmm": (lambda: torch.baddbmm(x(1, 4, 4), x(1, 4, 4), x(1, 4, 4)), LOW),
    "multi_dot": (lambda: torch.linalg.multi_dot([x(), x(), x()]), LOW),
    "conv2d": (lambda: module(nn.Conv2d, 1, 1, 3)(x(1, 1, 4, 4)), LOW),
    "conv_transpose2d": (lambda: module(nn.ConvTranspose2d, 1, 1, 2)(x(1, 1, 4, 4)), LOW),
    "prelu": (lambda: module(nn.PReLU)(x()), LOW),
    "attention": (lambda: F.scaled_dot_product_attention(*(x(1, 1, 4, 4),) * 3), LOW),
    "gru cell": (lambda: module(nn.GRUCell, 4, 4)(x()), LOW),
    "lstm cell": (lambda: module(nn.LSTMCell, 4, 4)(x())[0], LOW),
    "softmax": (lambda: low().softmax(-1), FULL),
    "softmax of a type": (lambda: low().softmax(-1, dtype=LOW), LOW),
    "log_softmax": (lambda: low().log_softmax(-1), FULL),
    "sum": (lambda: low().sum(), FULL),
    "sum over one": (lambda: low().sum(0), FULL),
    "cumsum": (lambda: low().cumsum(0), FULL),
    "prod": (lambda: low().prod(), FULL),
    "exp": (lambda: low().exp(), FULL),
    "log": (lambda: low().log(), FULL),
    "pow": (lambda: low() ** 2, FULL),
    "rsqrt": (lambda: low().rsqrt(), FULL),
    "layer_norm": (lambda: module(nn.LayerNorm, 4)(low()), FULL),
    "group_norm": (lambda: module(nn.GroupNorm, 2, 4)(low()), FULL),
    "rms_norm": (lambda: F.rms_norm(low(), (4,)), FULL),
    "mse_loss": (lambda: F.mse_loss(low(), low()), FULL),
    "cross_entropy": (lambda: F.cross_entropy(low(), x(4).long()), FULL),
    "bce": (lambda: F.binary_cross_entropy_with_logits(low(), low()), FULL),
    "norm": (lambda: low().norm(), FULL),
    "cosine_similarity": (lambda: F.cosine_similarity(low(), low()), FULL),
    "interpolate": (lambda: F.interpolate(low(1, 1, 4, 4), size=(2, 2)), FULL),
    "cdist": (lambda: torch.cdist(low(), low()), FULL),
    "mean": (lambda: low().mean(), LOW),
    "add": (lambda: low() + low(), LOW),
    "add of both": (lambda: low() + x(), FULL),
    "relu": (lambda: low().relu(), LOW),
    "gelu": (lambda: F.gelu(low()), LOW),
    "dropout": (lambda: F.dropout(low()), LOW),
    "cat": (lambda: torch.cat([low(), x()]), FULL),
    "dot": (lambda: torch.dot(low(4), x(4)), FULL),
    "dot of low": (lambda: torch.dot(low(4), low(4)), LOW),
    "addcmul": (lambda: torch.addcmul(x(), low(), low()), FULL),
    "scatter_add": (
        lambda: torch.scatter_add(x(4), 0, torch.tensor([0], device="cuda"), low(1)),
        FULL,
    ),
    "float64": (lambda: x().double() @ x().double(), torch.float64),
    "integers": (lambda: x().long() + 1, torch.int64),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", DTYPES)
def test_types_of_results(name: str) -> None:
    compute, expected = DTYPES[name]
    with torch.autocast("cuda", dtype=LOW):
        assert compute().dtype == expected


@pytest.mark.usefixtures("device")
def test_what_is_on_and_off() -> None:
    model = module(nn.Linear, 4, 4)
    assert not torch.is_autocast_enabled("cuda")
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cpu")
        assert model(x()).dtype == torch.float16
        with torch.autocast("cuda", enabled=False):
            assert model(x()).dtype == FULL
        assert model(x()).dtype == torch.float16
    assert model(x()).dtype == FULL


@pytest.mark.usefixtures("device")
def test_the_hosts_own_autocast() -> None:
    assert torch.get_autocast_dtype("cpu") == LOW
    with torch.autocast("cuda"):
        assert torch.get_autocast_dtype("cpu") == LOW
        with torch.autocast("cpu"):
            assert torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu"):
        assert nn.Linear(4, 4)(torch.ones(1, 4)).dtype == LOW


@pytest.mark.usefixtures("device")
def test_each_autocast_is_for_its_own_tensors() -> None:
    for compute in (
        lambda place: nn.Linear(4, 4).to(place)(torch.ones(1, 4).to(place)),
        lambda place: torch.ones(2, 2).to(place) @ torch.ones(2, 2).to(place),
        lambda place: nn.Conv1d(1, 1, 1).to(place)(torch.ones(1, 1, 4).to(place)),
    ):
        with torch.autocast("cuda", dtype=torch.float16):
            assert (compute("cuda").dtype, compute("cpu").dtype) == (torch.float16, FULL)
        with torch.autocast("cpu"):
            assert (compute("cuda").dtype, compute("cpu").dtype) == (FULL, LOW)


@pytest.mark.usefixtures("device")
def test_as_a_decorator_and_in_a_thread() -> None:
    model, seen = module(nn.Linear, 4, 4), []

    @torch.autocast("cuda", dtype=LOW)
    def forward() -> Tensor:
        return model(x())  # type: ignore[no-any-return]

    def work() -> None:
        seen.append(model(x()).dtype)
        seen.append(forward().dtype)

    with torch.autocast("cuda"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [FULL, LOW]


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:.*amp.*:FutureWarning")
def test_the_older_names() -> None:
    model = module(nn.Linear, 4, 4)
    scaler = torch.cuda.amp.GradScaler(init_scale=8.0)
    with torch.cuda.amp.autocast():
        loss = model(x()).sum()
    assert loss.dtype == FULL
    scaler.scale(loss).backward()
    assert model.weight.grad is not None


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cuda")
        return tensor * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.usefixtures("device")
def test_functions_of_ones_own() -> None:
    leaf = low().requires_grad_()
    with torch.autocast("cuda", dtype=LOW):
        y: Any = Doubled.apply(leaf)  # type: ignore[no-untyped-call]
    y.sum().backward()
    assert y.dtype == FULL
    assert leaf.grad is not None
    assert leaf.grad.dtype == LOW


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_leaves_out_steps_that_overflow(fused: bool) -> None:
    model = module(nn.Linear, 4, 4)
    before = model.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for value, changed, scale in ((float("inf"), False, 2.0), (1.0, True, 2.0)):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((2, 4), value, device="cuda")).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.weight) != changed
        assert scaler.get_scale() == scale


def test_a_model_computes_what_it_does_under_the_cpus_autocast() -> None:
    results = []
    for place in ("cpu", "cuda"):
        with emulate():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(place)
            with torch.autocast(place, dtype=LOW):
                loss = model(torch.randn(4, 8).to(place)).float().square().mean()
            loss.backward()
            results.append([loss.cpu(), *(p.grad.cpu() for p in model.parameters())])
    assert all(map(torch.equal, *results))


def test_the_cpus_kernels_are_as_before() -> None:
    def types() -> list[torch.dtype]:
        h = torch.rand(4, 4).to(LOW)
        with torch.autocast("cpu", dtype=LOW):
            return [
                t.dtype for t in (h.softmax(-1), h**2, h.sum(), h.norm(), F.layer_norm(h, (4,)))
            ]

    before = types()
    with emulate():
        with torch.autocast("cuda", dtype=LOW):
            assert low().softmax(-1).dtype == FULL
        assert types() == before
    assert types() == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parts_of_composite_operators_are_cast_too(mode: Callable[[], Any]) -> None:
    with emulate(), mode(), torch.autocast("cuda", LOW):
        assert torch.einsum("bij,kj->bik", x(2, 4, 4), x(4, 4)).dtype == LOW
