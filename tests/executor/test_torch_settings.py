"""A rerun computes under the settings of its forward, which the program may change before backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtrim.executor.registry import technique
from torchtrim.executor.torch_settings import torch_settings, under
from torchtrim.records.plan import Technique

CHANGES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "default dtype": (torch.set_default_dtype, torch.float64),
    "threads": (torch.set_num_threads, 2),
    "precision of products": (torch.set_float32_matmul_precision, "medium"),
    "deterministic": (torch.use_deterministic_algorithms, True),
    "oneDNN": (torch._C._set_mkldnn_enabled, False),
    "attention": (torch.backends.cuda.enable_math_sdp, False),
}


class Block(nn.Module):
    """Computes with numbers of the default type, and with the settings themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found = torch_settings()
        number = torch.tensor(0.1) + len(repr(found)) + found[1]
        return (self.linear(x).tanh() * number.sin()).sin()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with under(torch_settings()):
        yield


def gradient(change: Callable[[], Any], *, planned: bool) -> Tensor:
    """The gradient of a block whose settings change before backward."""
    torch.manual_seed(0)
    block, x = Block(), torch.ones(4, 8)
    if planned:
        technique("recompute").apply(
            {"Block": block}, Technique(name="recompute", where=("Block",), equivalence="BITWISE")
        )
    loss = block(x).sum()
    before = torch_settings()
    change()
    after = torch_settings()
    assert after != before
    loss.backward()
    assert torch_settings() == after
    found = block.linear.weight.grad
    assert found is not None
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_a_rerun_has_the_settings_of_its_forward(name: str) -> None:
    change, value = CHANGES[name]
    with under(torch_settings()):
        plain = gradient(lambda: change(value), planned=False)
    planned = gradient(lambda: change(value), planned=True)
    assert torch.equal(plain, planned)
