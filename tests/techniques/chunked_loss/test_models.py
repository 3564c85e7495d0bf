"""Heads as public language models have them, each written anew: what a loss is taken of is found in all."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steps import fitting
from torchtrim import TrainStep
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.chunked_loss.logits import Logits

CLASSES, WIDTH, LENGTH = 500, 16, 12


class Output(OrderedDict[str, Any]):
    """What a model gives: a dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Body(nn.Module):
    """What is before a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        made: Tensor = hidden + self.block(hidden)
        return made


class Head(nn.Module):
    """A body, and a head whose weight is the embedding's if `tied`."""

    def __init__(self, tied: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.body = Body()
        self.lm_head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.lm_head.weight = self.body.tokens.weight


class CausalTied(Head):
    """As GPT-2 in transformers: labels are shifted by a pad, logits cast, the mean by a number of labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.lm_head(self.body(x)[:, slice(0, None), :])
        wide = logits.float()
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        loss = F.cross_entropy(
            wide.view(-1, CLASSES), shifted.view(-1), ignore_index=-100, reduction="sum"
        )
        return Output(loss=loss / shifted.ne(-100).sum(), logits=logits)


class CausalUntied(Head):
    """As Llama in transformers, older: both are shifted."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.lm_head(self.body(x)).float()
        before = logits[..., :-1, :].contiguous().view(-1, CLASSES)
        loss = nn.CrossEntropyLoss()(before, labels[..., 1:].contiguous().view(-1))
        return Output(loss=loss, logits=logits)


class Shifted(Head):
    """As minimind: shifted views, the loss by a function, several results beside it."""

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        hidden = self.body(x)
        logits = self.lm_head(hidden[:, slice(0, None), :])
        before, after = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        loss = F.cross_entropy(before.view(-1, CLASSES), after.view(-1), ignore_index=-100)
        return Output(loss=loss, aux_loss=None, logits=logits, hidden_states=hidden)


class Pair(Head):
    """As nanoGPT: a pair of logits and loss."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(self.body(x))
        wanted = labels.view(-1)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), wanted, ignore_index=-1)
        return logits, loss


class Scaled(Head):
    """As T5: hidden states are scaled before a tied head, the loss is a module."""

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.lm_head(self.body(x) * WIDTH**-0.5)
        loss = nn.CrossEntropyLoss(ignore_index=-100)(
            logits.view(-1, logits.size(-1)), labels.view(-1)
        )
        return Output(loss=loss, logits=logits)


class Masked(Head):
    """As BERT: a transform, a decoder with a bias, most labels ignored."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        scores = self.lm_head(self.transform(self.body(x)))
        wanted = torch.where(x % 4 == 0, labels, -100)
        loss = nn.CrossEntropyLoss()(scores.view(-1, CLASSES), wanted.view(-1))
        return Output(loss=loss, logits=scores)


HEADS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": CausalTied,
    "llama": CausalUntied,
    "minimind": Shifted,
    "nanogpt": Pair,
    "t5": Scaled,
    "bert": Masked,
}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch, batch)
    loss: Tensor = output[1] if isinstance(output, tuple) else output.loss
    return loss


def graded(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_found_and_goes_without_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = HEADS[name]()
    batch = torch.randint(0, CLASSES, (8, LENGTH))
    step = TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), 0.1), batch)
    profile = fitting(step, steps=1).observe().profile
    assert profile is not None
    (option,) = technique("chunked_loss").options(step_of(profile))
    root = type(model).__name__
    assert option.where == f"{root}.lm_head"
    right = graded(copy.deepcopy(model).double(), batch)
    chosen = Technique(name="chunked_loss", where=(option.where,), equivalence="ROUNDING")
    handle = technique("chunked_loss").apply({root: model.double()}, chosen)
    with monkeypatch.context() as patch:
        patch.setattr(Logits, "value", _made)
        found = graded(model, batch)
    limit = 1e-6 if name in ("gpt2", "llama") else 1e-12
    torch.testing.assert_close(found, right, rtol=limit, atol=limit)
    handle.revert()
    torch.testing.assert_close(graded(model, batch), right, rtol=0, atol=0)


def _made(_: Logits) -> Tensor:
    raise AssertionError("the logits were computed")
