"""What others got wrong when they cut a batch: token counts that differ, and a count from outside.

The mean of the parts' means (transformers, October 2024: huggingface/transformers#34191) and a sum over all
that is divided by a count which some of the code ignores or divides by once more
(unslothai/unsloth-zoo#1023) are both wrong by far more than rounding, and nothing raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrim.records.plan import Technique
from torchtrim.techniques.micro_batch.technique import TECHNIQUE

CLASSES, LENGTH, PARTS, LIMIT = 50, 12, 4, 1e-6
COUNTS = (12, 1, 2, 12, 3, 1, 12, 0)
"""How many tokens of each sample count."""


class Language(nn.Module):
    """A model that takes its own loss; `items` is the count of a larger batch, as a trainer gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, 32)
        self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU())
        self.head = nn.Linear(64, CLASSES)

    def forward(
        self, tokens: Tensor, labels: Tensor, items: Tensor | int | None = None
    ) -> dict[str, Tensor]:
        logits = self.head(self.block(self.tokens(tokens)))
        return {"logits": logits, "loss": loss_of(logits, labels, items)}


def loss_of(logits: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
    """A mean over the tokens that count, or their sum over `items`."""
    given = logits.view(-1, CLASSES), labels.view(-1)
    if items is None:
        return F.cross_entropy(*given)
    return F.cross_entropy(*given, reduction="sum") / items


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CLASSES, (len(COUNTS), LENGTH))
    counted = torch.arange(LENGTH) < torch.tensor(COUNTS)[:, None]
    return tokens, torch.where(counted, tokens.roll(-1, 1), -100)


def gradient(model: nn.Module, losses: Callable[[nn.Module], Sequence[Tensor]]) -> Tensor:
    """That of the sum of some losses, each gone back from by itself."""
    model.zero_grad()
    for loss in losses(model):
        loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def in_parts(model: nn.Module) -> nn.Module:
    """A copy that runs in parts."""
    copied = copy.deepcopy(model)
    plan = Technique(name="micro_batch", where=("Net",), options={"parts": PARTS})
    TECHNIQUE.apply({"Net": copied}, plan)
    return copied


def rows(number: int) -> slice:
    size = len(COUNTS) // PARTS
    return slice(number * size, (number + 1) * size)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Language()


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_unequal_counts_are_exact_where_the_mean_of_means_is_far_off(
    model: nn.Module, where: str
) -> None:
    tokens, labels = batch()

    def whole(net: Any) -> list[Tensor]:
        found = net(tokens, labels)
        return [found["loss"] if where == "inside" else loss_of(found["logits"], labels, None)]

    def means(net: Any) -> list[Tensor]:
        each = range(PARTS - 1)
        return [net(tokens[rows(i)], labels[rows(i)])["loss"] / PARTS for i in each]

    right = gradient(model, whole)
    assert error(gradient(in_parts(model), whole), right) <= LIMIT
    assert error(gradient(model, means), right) > 0.1


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_count_from_outside_divides_once(model: nn.Module, kind: str) -> None:
    """Accumulation over four batches with the count of all: as one batch, in parts too."""
    tokens, labels = batch()
    count = int((labels != -100).sum())
    items = torch.tensor(count) if kind == "tensor" else count

    def accumulated(net: Any) -> list[Tensor]:
        return [net(tokens[rows(i)], labels[rows(i)], items)["loss"] for i in range(PARTS)]

    right = gradient(model, lambda net: [net(tokens, labels)["loss"]])
    assert error(gradient(model, accumulated), right) <= LIMIT
    assert (
        error(gradient(in_parts(model), lambda net: [net(tokens, labels, items)["loss"]]), right)
        <= LIMIT
    )
    halves = Technique(name="micro_batch", where=("Net",), options={"parts": 2})
    ours = copy.deepcopy(model)
    handle = TECHNIQUE.apply({"Net": ours}, halves)
    assert error(gradient(ours, accumulated), right) <= LIMIT
    handle.revert()
    assert torch.equal(gradient(ours, accumulated), gradient(model, accumulated))


@pytest.mark.parametrize(("name", "times"), [("ignored", PARTS), ("divided again", 1 / PARTS)])
def test_what_was_seen_to_go_wrong_is_four_times_off(
    model: nn.Module, name: str, times: float
) -> None:
    """The two forms of the defect, with equal counts, as its report has them; ours has neither."""
    tokens, labels = batch()
    labels = tokens.roll(-1, 1)
    count = labels.numel()

    def wrong(net: Any) -> list[Tensor]:
        each = range(PARTS)
        if name == "ignored":
            return [net(tokens[rows(i)], labels[rows(i)])["loss"] for i in each]
        return [net(tokens[rows(i)], labels[rows(i)], count)["loss"] / PARTS for i in each]

    right = gradient(model, lambda net: [net(tokens, labels, count)["loss"]])
    assert float(gradient(model, wrong).norm() / right.norm()) == pytest.approx(times, rel=1e-4)
    ours = gradient(in_parts(model), lambda net: [net(tokens, labels, count)["loss"]])
    assert error(ours, right) <= LIMIT
