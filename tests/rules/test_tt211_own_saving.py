"""Checkpointing and offload of the script's own are found with their time, and what it is without them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchtrim
from steps import squared
from torchtrim.core.units import parse_bytes
from torchtrim.emulator import emulate
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.tt211_own_saving import check


class Blocks(nn.Module):
    """Blocks that are kept, checkpointed or offloaded."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "offload":
            with torch.autograd.graph.save_on_cpu():
                return self.run(x)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            again = self.how == "checkpoint"
            x = x + (checkpoint(block, x, use_reentrant=False) if again else block(x))
        return x


def recorded(how: str, device: str) -> tuple[Profile, list[torch.Tensor]]:
    """The step, and the gradients of one."""
    torch.manual_seed(0)
    model = Blocks(how).to(device)
    batch = torch.randn(512, 64).to(device)
    squared(model, batch).backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    step = torchtrim.TrainStep(model, squared, torch.optim.SGD(model.parameters(), 0.01), batch)
    return torchtrim.record(step), gradients


def found_in(profile: Profile) -> Finding:
    (found,) = check(profile)
    return found


def told(found: Finding) -> tuple[int, int]:
    """The peaks without and with it that the message names."""
    sizes = re.findall(r"([\d.]+ [KMG]iB)", found.message)
    without, now = (parse_bytes(size.replace(" ", "")) for size in sizes)
    return without, now


@pytest.mark.slow
def test_checkpointing_is_found_and_is_equal_without() -> None:
    profile, gradients = recorded("checkpoint", "cpu")
    plain, right = recorded("plain", "cpu")
    found = found_in(profile)
    assert found.path == __file__
    assert found.price_ms is not None
    assert found.count_per_step >= 4 * 2
    without, now = told(found)
    assert without > now == pytest.approx(profile.tracked_peak_bytes, rel=0.05)
    assert plain.tracked_peak_bytes == pytest.approx(without, rel=0.1)
    assert not list(check(plain))
    assert all(torch.equal(a, b) for a, b in zip(gradients, right, strict=True))


def test_offload_is_found_and_is_equal_without() -> None:
    with emulate():
        profile, gradients = recorded("offload", "cuda")
        plain, right = recorded("plain", "cuda")
    found = found_in(profile)
    assert "offload" in found.message
    without, _ = told(found)
    assert plain.tracked_peak_bytes == pytest.approx(without, rel=0.15)
    assert not list(check(plain))
    assert all(torch.equal(a, b) for a, b in zip(gradients, right, strict=True))
