"""The chunked loss is found, planned as it is measured, equal up to rounding, and undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchtrim
from steps import fitting, quiet
from torchtrim import TrainStep
from torchtrim.dryrun.workspace import needed
from torchtrim.errors import ApplyFailed, UsageError
from torchtrim.executor.registry import check_known, technique
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.chunked_loss.logits import Logits
from torchtrim.workflows.optimize.fitting import Fitting

CLASSES, WIDTH = 2000, 32
SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(2000, 32), nn.Linear(32, 2000, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, x, y):
        logits = self.head(self.tokens(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    for _ in range(2):
        x = torch.randint(0, 2000, (16, 64))
        logits, loss = model(x, x.roll(-1, 1))
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LossOf = Callable[[Tensor, Tensor], Tensor]


class Language(nn.Module):
    """A model of tokens; `kind` says how its head is."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        if kind != "product":
            self.head = nn.Linear(WIDTH, CLASSES, bias=kind in ("bias", "strided"))
        if kind == "tied":
            self.head.weight = self.tokens.weight
        if kind == "frozen":
            self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.inner(self.tokens(x)))
        if self.kind == "strided":  # As of a recurrent layer with the batch first.
            hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1)
        if self.kind == "product":
            return hidden @ self.tokens.weight.t()
        made: Tensor = self.head(hidden)
        return made


def flat(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), tokens.view(-1))


LOSSES: dict[str, LossOf] = {
    "scaled": lambda x, y: flat(x, y) / 2,
    "transposed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "each": lambda x, y: (
        F.cross_entropy(x.view(-1, CLASSES), y.view(-1), reduction="none") * y.view(-1).ne(3)
    ).sum(),
    "gather": lambda x, y: -x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(),
    "float": lambda x, y: flat(x.float(), y),
    "smooth": lambda x, y: F.cross_entropy(x.view(-1, CLASSES), y.view(-1), label_smoothing=0.1),
    "shift": lambda x, y: F.cross_entropy(
        x[:, :-1].contiguous().view(-1, CLASSES), y[:, 1:].reshape(-1)
    ),
}
KINDS = ("", "tied", "bias", "frozen", "product", "autocast", "strided")
QUICK = ("", "each", "gather", "strided")


def training(model: nn.Module, loss: LossOf = flat) -> TrainStep:
    """A step of tokens that are their own classes."""
    torch.manual_seed(1)
    tokens = torch.randint(0, CLASSES, (8, 64))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def lost(m: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=getattr(m, "kind", "") == "autocast"):
            return loss(m(batch), batch)

    return TrainStep(model, lost, optimizer, tokens)


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (*KINDS, *LOSSES) if n not in QUICK),
    ],
)
def test_the_peak_is_as_predicted_and_all_is_equal(name: str) -> None:
    model = Language(name if name in KINDS else "")
    others = ("recompute", "overwrite", "replay")
    fit = Fitting(
        training(model, LOSSES.get(name, flat)), Request(steps=1), quiet, Terms("ROUNDING", others)
    ).smallest()
    (chosen,) = fit.plan.techniques
    assert chosen.name == "chunked_loss"
    assert chosen.where == ("Language" if name == "product" else "Language.head",)
    assert fit.planned is not None
    square = torch.zeros(512, 512, dtype=torch.bfloat16)
    scratch = needed(lambda: torch.mm(square, square)) if name == "autocast" else 0
    predicted = pytest.approx(fit.plan.predicted.peak_bytes, rel=2e-3, abs=scratch)
    assert (
        fit.planned.peak_bytes == predicted
    )  # Scratch of products in bfloat16 is the processor's.
    assert fit.planned.peak_bytes < 0.6 * fit.original.peak_bytes
    assert fit.certificate is not None
    assert fit.certificate.verdict == "ROUNDING"


class OfGiven(nn.Module):
    """A loss of its own, to which the weights of another module are given."""

    def forward(self, weight: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        chances = F.linear(hidden.flatten(0, 1), weight[:CLASSES]).log_softmax(-1)
        return -chances.gather(1, tokens.view(-1, 1)).mean()


def test_a_loss_of_weights_that_it_is_given_is_chunked() -> None:
    criterion, tokens = OfGiven(), torch.randint(0, CLASSES, (8, 64))
    weight = nn.Parameter(torch.randn(CLASSES + 5, WIDTH))
    hidden = torch.randn(8, 64, WIDTH, requires_grad=True)
    step = TrainStep(
        criterion, lambda m, y: m(weight, hidden, y), torch.optim.SGD([weight], 0.1), tokens
    )
    fit = Fitting(step, Request(steps=1), quiet, Terms("ROUNDING", ("recompute", "replay")))
    found = fit.smallest()
    assert [one.name for one in found.plan.techniques] == ["chunked_loss"]
    assert found.planned is not None
    assert found.planned.peak_bytes == pytest.approx(found.plan.predicted.peak_bytes, rel=2e-3)
    assert found.planned.peak_bytes < 0.6 * found.original.peak_bytes


def test_what_is_read_besides_is_computed_where_it_is_read() -> None:
    """Another loss reads the logits, so nothing is offered; a plan that says so all the same is right."""
    step = training(Language(), lambda x, y: flat(x, y) + x.sigmoid().mean())
    found = fitting(step).observe()
    assert found.profile is not None
    assert technique("chunked_loss").options(step_of(found.profile)) == ()
    chosen = Technique(name="chunked_loss", where=("Language.head",), equivalence="ROUNDING")
    right, ours = Language(), Language()
    handle = technique("chunked_loss").apply({"Language": ours}, chosen)
    tokens = torch.randint(0, CLASSES, (2, 8))
    for model in (right, ours):
        logits = model(tokens)
        (flat(logits, tokens) + logits.sigmoid().mean()).backward()
    for one, other in zip(right.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    handle.revert()
    assert type(ours(tokens)) is Tensor


def test_without_gradients_it_is_as_it_was() -> None:
    model = Language()
    chosen = Technique(name="chunked_loss", where=("Language.head",), equivalence="ROUNDING")
    handle = technique("chunked_loss").apply({"Language": model}, chosen)
    tokens = torch.randint(0, CLASSES, (2, 8))
    assert type(model(tokens)) is Logits
    with torch.no_grad():
        assert type(model(tokens)) is Tensor
    handle.revert()


def test_levers_say_what_rounding_would_give() -> None:
    found = fitting(training(Language()), steps=1).nearest(memory_limit("10%"))
    levers = {lever.technique: lever for lever in found.levers}
    assert levers["chunked_loss"].needs == "--allow rounding"
    assert levers["chunked_loss"].equivalence == "ROUNDING"
    assert levers["chunked_loss"].peak_bytes < 0.6 * found.original.peak_bytes


@pytest.mark.slow
def test_a_fitted_model_is_what_it_was_afterwards() -> None:
    model = Language("tied")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torchtrim.fit(training(model), "60%", steps=1, allow="ROUNDING") as fitted:
        assert "chunked_loss" in [one.name for one in fitted.plan.techniques]
        assert list(model.state_dict()) == list(before)
    assert type(model.head) is nn.Linear
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("where", "options", "said"),
    [
        ("Language.inner", {"row": 3}, "no option 'row'"),
        ("Language.inner", {"rows": -1}, "has the options `rows` and `classes`, 0 or more"),
        ("Language", {}, "Give the option classes"),
        ("Language.nothing", {}, "no such module"),
    ],
)
def test_what_cannot_be_applied_is_said(where: str, options: dict[str, int], said: str) -> None:
    chosen = Technique(
        name="chunked_loss", where=(where,), options=dict(options), equivalence="ROUNDING"
    )

    def apply() -> None:
        check_known(chosen)
        technique("chunked_loss").apply({"Language": Language()}, chosen)

    with pytest.raises((ApplyFailed, UsageError), match=said):
        apply()


@pytest.mark.slow
def test_logits_that_a_name_holds_into_the_next_step_are_gone_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    workload = Script(str(tmp_path / "train.py"))
    others = ("recompute", "overwrite", "replay", "plain_optimizer", "optimizer_in_backward")
    fit = Fitting(
        workload,
        Request(steps=1),
        quiet,
        Terms("ROUNDING", others),
    ).smallest()
    assert [one.name for one in fit.plan.techniques] == ["chunked_loss"]
    assert fit.planned is not None
    assert fit.planned.peak_bytes == pytest.approx(fit.plan.predicted.peak_bytes, rel=1e-2)
    assert fit.planned.peak_bytes < 0.5 * fit.original.peak_bytes
    assert fit.certificate is not None
    assert fit.certificate.verdict == "ROUNDING"
