"""A model in stages in one process: the same gradients as of the whole batch, and errors that say why not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipelines.models import BATCH, Block, Gpt, batch, gradients, loss_of, pipeline, staged
from torchtrim.errors import ApplyFailed, Unsupported
from torchtrim.records.pipeline import SCHEDULES, Pipeline, Stage

TWO = ("transformer.h.2",)
FOUR = ("transformer.h.1", "transformer.h.2", "transformer.h.3")


@pytest.fixture(autouse=True)
def _double() -> object:
    torch.set_default_dtype(torch.float64)
    yield None
    torch.set_default_dtype(torch.float32)


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    one, two = gradients(model), gradients(other)
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_sum_over_microbatches_is_the_whole_batchs(schedule: str, masked: bool) -> None:
    whole = Gpt(masked=masked)
    model = copy.deepcopy(whole)
    single = schedule in ("GPipe", "1F1B")
    staged(model, pipeline(TWO if single else FOUR, schedule, 2))  # type: ignore[arg-type]
    tokens, targets = batch()
    loss = loss_of(whole(tokens), targets)
    loss.backward()
    promised = loss_of(model(tokens), targets)
    promised.backward()
    assert largest_difference(whole, model) < 1e-14
    assert abs(promised.item() - loss.item()) < 1e-12


def test_a_chain_of_layers_is_cut_anywhere() -> None:
    whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    for cut in ("1", "2", "3", "4"):
        model = copy.deepcopy(whole)
        staged(model, pipeline((cut,), "1F1B", 2))
        x, y = torch.randn(BATCH, 6), torch.randint(3, (BATCH,))
        whole.zero_grad()
        nn.CrossEntropyLoss()(whole(x), y).backward()
        nn.CrossEntropyLoss()(model(x), y).backward()
        assert largest_difference(whole, model) < 1e-14


def test_gradients_of_earlier_passes_stay() -> None:
    whole = Gpt(depth=2)
    model = staged(copy.deepcopy(whole), pipeline(("transformer.h.1",), "GPipe", 2))
    for seed in (1, 2):
        tokens, targets = batch(seed)
        (loss_of(whole(tokens), targets) / 2).backward()
        (loss_of(model(tokens), targets) / 2).backward()
    assert largest_difference(whole, model) < 1e-14


def test_replicas_share_the_batch() -> None:
    whole = Gpt(depth=2)
    plan = Pipeline(
        root="Model",
        cuts=("transformer.h.1",),
        schedule="GPipe",
        ranks=2,
        microbatches=2,
        replicas=2,
    )
    model = staged(copy.deepcopy(whole), plan)
    for _ in range(2):
        tokens, targets = batch()
        loss_of(whole(tokens), targets).backward()
        loss_of(model(tokens), targets).backward()
    assert largest_difference(whole, model) < 1e-14


def test_what_the_script_draws_afterwards_is_as_without_stages() -> None:
    model = staged(Gpt(depth=2, dropout=0.5), pipeline(("transformer.h.1",), "GPipe", 2))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tokens, targets = batch()
    loss_of(model(tokens), targets).backward()
    assert torch.equal(torch.rand(3), expected)


def test_recomputed_stages_drop_out_the_same() -> None:
    stage = {"rank": 0, "forward_seconds": 0.0, "backward_seconds": 0.0}
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        own = Stage(first="", held_bytes=0, state_bytes=0, recompute=again, **stage)  # type: ignore[arg-type]
        plan = Pipeline(
            root="Model",
            cuts=("transformer.h.1",),
            schedule="GPipe",
            ranks=2,
            microbatches=4,
            stages=(own, own),
        )
        model = staged(Gpt(depth=2, dropout=0.5), plan)
        tokens, targets = batch()
        loss_of(model(tokens), targets).backward()
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class Skips(nn.Module):
    """What the first block gave is needed by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.c(self.b(first)) + first


def test_a_tensor_that_skips_a_stage_becomes_no_number() -> None:
    """The planner refuses such a cut; a plan written by hand gives no wrong result in silence."""
    model = staged(Skips(), pipeline(("c",), "GPipe", 2))
    loss = model(torch.randn(BATCH, 4)).square().mean()
    loss.backward()
    assert loss.isnan()


def refusal(model: nn.Module, use: str) -> str:
    tokens, targets = batch()
    scores, flat = model(tokens), targets.flatten()
    uses = {
        "value": lambda: float(cross_entropy(scores.flatten(0, 1), flat)),
        "sum": lambda: cross_entropy(scores.flatten(0, 1), flat, reduction="sum").backward(),
        "sizes": lambda: cross_entropy(scores.view(BATCH * 8, -1), flat).backward(),
        "many": lambda: scores.mean(-1).backward(),
    }
    with pytest.raises((Unsupported, ApplyFailed)) as caught:
        uses[use]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("value", "after `loss.backward()`"),
        ("sum", "sums over its samples"),
        ("sizes", "-1"),
        ("many", "a scalar"),
    ],
)
def test_a_loss_that_cannot_be_taken_in_parts_says_why(use: str, said: str) -> None:
    model = staged(Gpt(depth=2), pipeline(("transformer.h.1",), "GPipe", 2))
    assert said in refusal(model, use)


def test_a_batch_that_does_not_divide_says_so() -> None:
    model = staged(Gpt(depth=2), pipeline(("transformer.h.1",), "GPipe", 2, microbatches=3))
    with pytest.raises(Unsupported, match="drop_last"):
        model(batch()[0])


def test_evaluation_says_that_no_rank_has_all() -> None:
    model = staged(Gpt(depth=2), pipeline(("transformer.h.1",), "GPipe", 2))
    with torch.no_grad(), pytest.raises(Unsupported, match="without gradients"):
        model(batch()[0])


@pytest.mark.parametrize("cut", ["", "nowhere", "transformer.h.9"])
def test_a_cut_that_is_no_module_is_refused(cut: str) -> None:
    with pytest.raises(ApplyFailed, match="no such module"):
        staged(Gpt(depth=2), pipeline((cut,), "GPipe", 2))


def test_an_order_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ApplyFailed, match="no 1F1B"):
        staged(Gpt(depth=2), pipeline(("transformer.h.1",), "1F1B", 2, microbatches=1))


def test_blocks_are_as_a_person_would_write_them() -> None:
    assert Block()(torch.randn(2, 8, 16)).shape == (2, 8, 16)
