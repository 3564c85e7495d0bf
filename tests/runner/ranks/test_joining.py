"""Which backend a group of ranks gets."""

from __future__ import annotations

import pytest
import torch

from torchtrim.emulator.device import current
from torchtrim.runner.ranks.joining import Joining


@pytest.mark.parametrize(
    ("gpus", "asked", "served"),
    [(0, "nccl", "gloo"), (1, "nccl", "gloo"), (2, "nccl", "nccl"), (0, "gloo", "gloo")],
)
def test_nccl_needs_a_real_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str, served: str
) -> None:
    """Also where torch is built for CUDA, and to be asked begins no emulation."""
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: gpus, raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert Joining(2)._served(asked, {}) == served
    assert current() is None
