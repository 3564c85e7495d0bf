"""A program's operators have one name each on every device, whatever kernels compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steps import encoder
from torchtrim.emulator import emulate
from torchtrim.executor.ordinals import CallRoles, Counting
from torchtrim.executor.roles import is_inside


class Attention(nn.Module):
    def __init__(self, dropout: float, *, masked: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.options = dropout, causal
        self.masked = masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(x.shape[1], x.shape[1], device=x.device) if self.masked else None
        made = F.scaled_dot_product_attention(q, k, v, mask, *self.options)
        return F.gelu(made.transpose(1, 2).reshape(x.shape)) * 3


class Listing(TorchDispatchMode):
    """The roles of forward operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.roles: list[str] = []
        self._naming = CallRoles()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.roles.append(self._naming.role(func, args))
        result = func(*args, **(kwargs or {}))
        self._naming.made(result)
        return result


def roles(model: nn.Module, batch: torch.Tensor) -> list[str]:
    with Listing() as listing:
        model(batch)
    return listing.roles


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(32, 32, 2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.cells(x)[0]) * 2


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x[:, 0], self.cell(x[:, 1])).sigmoid()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(0.0),
    "attention with dropout": lambda: Attention(0.1),
    "causal": lambda: Attention(0.1, causal=True),
    "masked": lambda: Attention(0.1, masked=True),
    "encoder": encoder,
    "dropout": lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Dropout(0.2)),
    "rms_norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 32)),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "cell": lambda: Cells(),
    "half rms_norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32)),
}
MASKS = {"ones", "tril", "scalar_tensor", "zeros_like", "bitwise_not", "masked_fill_"}
"""How a mask is prepared, before anything tells what it is for."""


@pytest.mark.parametrize("name", MODELS)
def test_what_the_program_calls_is_counted_alike_on_a_cpu_and_a_gpu(name: str) -> None:
    def counted(where: str) -> dict[str, int]:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if name.startswith("half") else torch.float32
        model, batch = MODELS[name]().to(where, dtype), torch.randn(2, 8, 32).to(where, dtype)
        with Counting() as counting:
            model(batch)
        own = {role for role in counting.counts if not is_inside(role) and "::" not in role}
        return {one: counting.counts[one] for one in own - MASKS - {"rnn"} if counting.counts[one]}

    here = counted("cpu")
    with emulate():
        assert counted("cuda") == here


def test_a_group_is_named_by_what_it_computes() -> None:
    listed = roles(Attention(0.1), torch.randn(2, 8, 32))
    assert [role for role in listed if role][-4:] == [
        "scaled_dot_product_attention",
        "attention-clone",
        "gelu",
        "mul",
    ]
    assert "attention-softmax" in listed
    assert "softmax" not in listed
    rms = [role for role in roles(nn.RMSNorm(32), torch.randn(4, 32)) if role.startswith("rms")]
    assert rms == ["rms_norm-add_", "rms_norm-rsqrt", "rms_norm-mul", "rms_norm"]


def test_the_programs_own_mean_of_squares_is_not_a_norm() -> None:
    x = torch.randn(4, 32)
    plain = roles(nn.Sequential(), x)

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    assert roles(Own(), x)[len(plain) :] == ["pow", "mean", "add", "rsqrt", "mul"]
