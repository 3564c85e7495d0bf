"""Logits that are read below Python, where no function of torch tells of it, have their gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchtrim.executor.autograd import NotTwice
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique

Reader = Callable[[Tensor, Tensor], Tensor]


class Scaled(torch.autograd.Function):
    """The product of two tensors."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        one, other = ctx.saved_tensors
        return gradient * other, (gradient * one).sum(0)


def by_a_function(logits: Tensor, scale: Tensor) -> Tensor:
    return Scaled.apply(logits, scale).sin()  # type: ignore[no-any-return, no-untyped-call]


def by_a_function_and_the_loss(logits: Tensor, scale: Tensor) -> Tensor:
    return by_a_function(logits, scale).sum() + F.cross_entropy(logits, torch.arange(6))


def of_log_probabilities(logits: Tensor, scale: Tensor) -> Tensor:
    return by_a_function(logits.view(3, 2, 8).flatten(0, 1)[1:].log_softmax(-1), scale)


def of_what_was_computed(logits: Tensor, scale: Tensor) -> Tensor:
    return by_a_function(logits, scale) + logits.exp()


def in_a_checkpoint(logits: Tensor, scale: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda one: one.sin() * one * scale, logits, use_reentrant=False)
    return found


def in_a_reentrant_checkpoint(logits: Tensor, scale: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda *both: Scaled.apply(*both), logits, scale, use_reentrant=True)
    return found.sin()


READERS = (
    by_a_function,
    by_a_function_and_the_loss,
    of_log_probabilities,
    of_what_was_computed,
    in_a_checkpoint,
    in_a_reentrant_checkpoint,
)


def head(*, planned: bool) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Linear(5, 8)
    if planned:
        plan = Technique(name="chunked_loss", where=("Head",), options={"rows": 2})
        technique("chunked_loss").apply({"Head": made}, plan)
    return made


def gradients(reader: Reader, *, planned: bool) -> list[Tensor | None]:
    model = head(planned=planned)
    x = torch.linspace(-1, 1, 30).view(6, 5).requires_grad_()
    scale = torch.linspace(0.5, 1.5, 8).requires_grad_()
    reader(model(x), scale).sum().backward()
    return [one.grad for one in (x, scale, *model.parameters())]


@pytest.mark.parametrize("reader", READERS, ids=lambda one: one.__name__)
def test_gradients_are_those_of_the_original(reader: Reader) -> None:
    for plain, planned in zip(
        gradients(reader, planned=False), gradients(reader, planned=True), strict=True
    ):
        assert plain is not None
        torch.testing.assert_close(planned, plain)


def test_a_second_differentiation_stops() -> None:
    logits = head(planned=True)(torch.ones(6, 5))
    found = Scaled.apply(logits, torch.ones(8))  # type: ignore[no-untyped-call]
    with pytest.raises(NotTwice, match="chunked_loss"):
        found.sum().backward(create_graph=True)
