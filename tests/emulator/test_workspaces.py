"""Workspaces of cuBLAS: one for each thread's handle and stream, of the size of the capability."""

from __future__ import annotations

import pytest
import torch

from torchtrim.emulator.device import emulate
from torchtrim.emulator.runtime import MODELS

MIB = 2**20
USUAL = 8320 * 1024


def multiply(*, backward: bool = False, side: bool = False) -> None:
    a = torch.randn(8, 8, device="cuda", requires_grad=backward)
    result = a @ a
    if backward:
        result.sum().backward()
    if side:
        with torch.cuda.stream(torch.cuda.Stream()):
            a @ a


@pytest.mark.parametrize(
    ("model", "size"),
    [("t4", USUAL), ("a100", USUAL), ("h100", 32 * MIB), ("b200", USUAL), ("mi300x", 0)],
)
def test_sizes_by_capability(model: str, size: int) -> None:
    with emulate(MODELS[model]) as emulation:
        multiply()
        assert emulation.workspaces.bytes == size


def test_backward_and_streams_have_their_own() -> None:
    with emulate() as emulation:
        multiply()
        multiply()
        assert emulation.workspaces.bytes == USUAL
        multiply(backward=True)
        assert emulation.workspaces.bytes == 2 * USUAL
        multiply(side=True)
        assert emulation.workspaces.bytes == 3 * USUAL


def test_without_a_product_none() -> None:
    with emulate() as emulation:
        torch.ones(8, device="cuda").exp().sum()
        torch.ones(8, 8) @ torch.ones(8, 8)
        assert not emulation.workspaces.bytes


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8:16:8")
    with emulate() as emulation:
        multiply()
        assert emulation.workspaces.bytes == (8 * 4096 + 8 * 16) * 1024


def test_the_allocator_reserves_them_but_counts_them_as_nothing_allocated() -> None:
    """A segment of 20 MiB keeps room for 8 MiB beside the workspace; 16 MiB get one of their own."""
    with emulate():
        a = torch.zeros(2**11, 2**10, device="cuda")
        allocated = torch.cuda.memory_allocated()
        del a
        multiply()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 20 * MIB
        assert torch.cuda.memory_allocated() == 0 < allocated
        torch.zeros(2**11, 2**10, device="cuda")
        assert torch.cuda.memory_reserved() == 20 * MIB
        torch.zeros(2**11, 2**11, device="cuda")
        assert torch.cuda.memory_reserved() == (20 + 16) * MIB
