"""Operators whose shapes depend on values: the true size where it is known, else one that is never less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torchtrim.dryrun.run import dry_run

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x > 0)[0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "boolean index": lambda x: x[x > 0],
    "boolean rows": lambda x: x[x[:, 0] > 0],
    "unique": lambda x: x.round().unique(),
    "unique with inverse": lambda x: x.round().unique(return_inverse=True)[1],
    "unique rows": lambda x: x.round().unique(dim=0),
    "unique_consecutive": lambda x: x.round().unique_consecutive(),
    "bincount": lambda x: x[:, 0].abs().long().bincount(minlength=64),
    "boolean assignment": lambda x: x.clone().index_put_((x > 0,), torch.tensor(0.0)),
    "argwhere": lambda x: torch.argwhere(x > 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bound_is_never_less(name: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(40, 30)
    real = CASES[name](batch)
    with dry_run(".", owned_only=True) as dry:
        bound = CASES[name](batch + 0)
    assert bound.dtype == real.dtype
    assert bound.dim() == real.dim()
    assert all(mine >= true for mine, true in zip(bound.shape, real.shape, strict=True))
    assert name == "boolean assignment" or dry.guesses.notes()[0].startswith("tests")


def test_one_number_behind_a_mask_needs_no_indices() -> None:
    with dry_run(".", owned_only=True) as dry:
        x = torch.randn(40, 30)
        for value, scratch in ((torch.tensor(1.0), 0), (torch.randn(30), 2 * 40 * 30 * 8)):
            dry.take_workspace()
            x[x > 0] = value if value.dim() == 0 else torch.randn(40 * 30)
            assert dry.take_workspace() == scratch


def test_what_depends_on_them_goes_on() -> None:
    with dry_run(".", owned_only=True):
        x = torch.randn(64, 100, requires_grad=True)
        chosen = (x * 2)[x > 0]
        chosen.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_branches_are_told_no_and_say_where() -> None:
    with dry_run(".", owned_only=True) as dry:
        loss = torch.randn(1000).mean()
        assert not torch.isnan(loss)
        assert loss.item() == 1.0
        assert not torch.equal(torch.randn(500), torch.randn(500))
    assert len(dry.guesses.notes()) == 2


def test_packed_sequences_are_as_long_as_their_lengths() -> None:
    lstm = nn.LSTM(40, 50, batch_first=True)
    lengths = torch.tensor([7, 4, 2])

    def packed() -> torch.Tensor:
        batch = pack_padded_sequence(torch.randn(3, 7, 40), lengths, batch_first=True)
        output, _ = lstm(batch)
        assert output.data.shape == (13, 50)
        return pad_packed_sequence(output, batch_first=True)[0]

    real = packed()
    with dry_run(".", owned_only=True):
        assert packed().shape == real.shape


def test_repeats_are_added_up_where_they_are_known() -> None:
    with dry_run(".", owned_only=True) as dry:
        known = torch.randn(3, 200).repeat_interleave(torch.tensor([2, 0, 5]), 0)
        assert known.shape == (7, 200)
        assert not dry.guesses.found
        counts = torch.randn(300).abs().long()
        assert torch.randn(300, 5).repeat_interleave(counts, 0).shape == (300, 5)
        assert "repeat_interleave" in dry.guesses.notes()[0]


def test_a_scaler_finds_its_gradients_finite_and_steps() -> None:
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    with dry_run(".", owned_only=False):
        scaler.scale(net(torch.randn(32, 64)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert steps == [1]


@pytest.mark.parametrize(("rows", "samples"), [(100, 8), (200_000, 100_000), (1_000, 100_000)])
def test_a_sparse_gradient_has_at_most_a_row_for_each_index(rows: int, samples: int) -> None:
    """Few indices are known; many count as if they were distinct."""
    with dry_run(".", owned_only=False) as dry:
        table = nn.Embedding(rows, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        given = torch.randint(rows, (samples,))
        table(given).square().sum().backward()
        optimizer.step()
        merged = table.weight.grad.coalesce().values()
        most = len(given.unique()) if dry.knows(given) else min(rows, samples)
    assert merged.shape == (most, 4)
