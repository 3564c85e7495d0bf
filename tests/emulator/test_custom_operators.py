"""Operators of the script's own, with one kernel for all devices, run where their tensors are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchtrim.emulator import emulate
from torchtrim.techniques.chunked_loss.ops import linear_cross_entropy

LIBRARY: Any = torch.library.Library("torchtrim_test_custom", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")


def twice(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(x.shape, device=x.device)
    return made.copy_(x) + x.new_zeros(x.shape) + x


LIBRARY.impl("twice", twice, "CompositeExplicitAutograd")


def test_it_makes_its_tensors_on_the_device() -> None:
    run: Any = torch.ops.torchtrim_test_custom.twice
    with emulate():
        assert run(torch.ones(3).cuda()).device.type == "cuda"
        assert run(torch.ones(3)).device.type == "cpu"
        assert run(torch.ones(3).cuda()).cpu().tolist() == [2, 2, 2]


def test_the_loss_without_logits_and_its_gradients() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 4), torch.randn(50, 4)
    target = torch.randint(0, 50, (30,))
    with emulate():
        given = [x.cuda().requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy(*given, target.cuda(), rows=8)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.device.type == "cuda"
        gradients = [x.grad.cpu() for x in given if x.grad is not None]
    right = [x.requires_grad_() for x in (hidden, weight)]
    F.cross_entropy(F.linear(*right), target).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients, [x.grad for x in right])
