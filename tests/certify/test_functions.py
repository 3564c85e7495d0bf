"""A decorated function is compared with its reference: results, gradients, writes and random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import torchtrim

Call = Callable[..., torch.Tensor]


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def by_hand(x: torch.Tensor, fault: float = 0.0) -> torch.Tensor:
    powers = torch.exp(x - x.amax(-1, keepdim=True).detach())
    return powers / powers.sum(-1, keepdim=True) * (1 + fault)


def inputs() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(16, 33, requires_grad=True)


def test_rounding_passes_and_a_small_fault_does_not() -> None:
    x = inputs()
    torch.testing.assert_close(torchtrim.same_as(softmax)(by_hand)(x), softmax(x))
    with pytest.raises(
        AssertionError, match=r"result 0, by 1\.\de-07.*more than rounding explains"
    ):
        torchtrim.same_as(softmax)(lambda x: by_hand(x, 1e-7))(x)


def test_rtol_accepts_more() -> None:
    assert (
        torchtrim.same_as(softmax, rtol=1e-2)(lambda x: by_hand(x, 1e-3))(inputs()).shape[0] == 16
    )
    with pytest.raises(AssertionError, match=r"rtol=0\.0001"):
        torchtrim.same_as(softmax, rtol=1e-4)(lambda x: by_hand(x, 1e-3))(inputs())


def detached(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x).detach()


def written(x: torch.Tensor) -> torch.Tensor:
    result = F.silu(x.clone())
    with torch.no_grad():
        x += 1
    return result


def drawn(x: torch.Tensor) -> torch.Tensor:
    torch.rand(1)
    return F.silu(x)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (detached, "gradient of input 0"),
        (written, "input 0"),
        (drawn, "random numbers drawn"),
        (lambda x: F.silu(x).double(), "result 0"),
    ],
)
def test_what_differs_is_named(wrong: Call, where: str) -> None:
    with pytest.raises(AssertionError, match=where):
        torchtrim.same_as(F.silu)(wrong)(inputs())


def test_the_call_itself_draws_once() -> None:
    x = inputs().detach()
    state = torch.get_rng_state()
    expected = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    assert torch.equal(torchtrim.same_as(F.dropout)(F.dropout)(x, 0.5), expected)
