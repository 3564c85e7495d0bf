"""A dry run: shapes are those of a run, nothing takes memory, and what is known stays known."""

from __future__ import annotations

import contextlib
import copy
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim import Unsupported
from torchtrim.dryrun.mode import Dry
from torchtrim.dryrun.run import current, dry_run

TERABYTE = 2**40


@pytest.fixture
def dry() -> Iterator[Dry]:
    with dry_run(".", owned_only=False) as mode:
        yield mode


def test_what_is_computed_takes_no_memory(dry: Dry) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weight = torch.randn(2**20, 2**18, requires_grad=True)
    (torch.randn(2**19, 2**18) @ weight.t()).relu().sum().backward()
    assert weight.grad is not None
    assert weight.grad.nbytes == weight.nbytes == TERABYTE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_tensors_are_plain_and_do_not_share_addresses(dry: Dry) -> None:
    one, other = torch.randn(10_000), torch.randn(10_000)
    assert type(one) is torch.Tensor
    assert one.data_ptr() != other.data_ptr()
    assert one[5:].data_ptr() == one.data_ptr() + 20
    assert not one.numpy().any()


def test_views_share_and_in_place_operators_give_the_same_tensor(dry: Dry) -> None:
    base = torch.randn(100, 100)
    view = base.t()[3:]
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert base.mul_(2) is base
    assert base.add_(view.sum()).relu_() is base


def test_strides_are_those_of_a_run() -> None:
    def computed() -> list[tuple[int, ...]]:
        images = torch.randn(2, 3, 17, 19).to(memory_format=torch.channels_last)
        weight = torch.randn(5, 3, 3, 3)
        results = (
            F.conv2d(images, weight),
            F.max_pool2d(images, 2),
            images.transpose(1, 2) + 1,
            torch.cat([images, images], 1),
            images.permute(3, 2, 1, 0).softmax(0),
            torch.einsum("bchw,bcij->bhi", images, images),
        )
        return [tuple(result.stride()) for result in results]

    expected = computed()
    with dry_run(".", owned_only=False):
        assert computed() == expected


def test_numbers_that_follow_from_a_batch_are_known(dry: Dry) -> None:
    lengths = torch.tensor([3, 5, 2])
    mask = torch.arange(5)[None] < lengths[:, None]
    assert int(lengths.max()) == 5
    assert mask.sum().item() == 10
    assert torch.randn(3, 5, 500)[mask].shape == (10, 500)
    assert mask.nonzero().shape == (10, 2)
    assert [x.item() for x in torch.linspace(0, 0.3, 4)] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert sorted(torch.randperm(50).tolist()) == list(range(50))
    assert not dry.guesses.found


def test_what_is_written_with_what_nobody_knows_is_not_known_any_longer(dry: Dry) -> None:
    counts = torch.zeros(4, dtype=torch.long)
    counts[1] = 7
    assert counts.sum().item() == 7
    counts += torch.randn(4, 1000).argmax(1)
    assert counts.sum().item() == 0
    (guess,) = dry.guesses.found
    assert "taken as 0" in guess.assumed
    assert guess.path == __file__


def test_a_live_model_is_not_written() -> None:
    norm = nn.BatchNorm1d(8)
    state = copy.deepcopy(norm.state_dict())
    with dry_run(".", owned_only=True):
        norm(torch.randn(4, 8))
        nn.init.ones_(norm.bias)
        norm.num_batches_tracked.fill_(3)
        assert norm.num_batches_tracked.item() == 0
    assert all(torch.equal(norm.state_dict()[name], value) for name, value in state.items())


def test_a_copy_is_blank(dry: Dry) -> None:
    layer = nn.Linear(2**20, 2**18)
    copied = copy.deepcopy(layer)
    assert copied.weight.nbytes == TERABYTE
    assert copied.weight.data_ptr() != layer.weight.data_ptr()


def test_mistakes_are_those_of_a_run(dry: Dry) -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        torch.randn(30, 40) @ torch.randn(30, 40)


def test_a_result_that_is_given_is_resized(dry: Dry) -> None:
    out = torch.empty(0)
    torch.add(torch.randn(300, 400), 1, out=out)
    assert out.shape == (300, 400)
    assert torch.randn(50).resize_(3000, 2).shape == (3000, 2)


def test_nothing_is_saved(dry: Dry, tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "weights.pt")
    assert not [*tmp_path.iterdir()]
    assert any("torch.save" in note for note in dry.guesses.notes())


def test_an_operator_that_nobody_knows_is_named(dry: Dry) -> None:
    library = torch.library.Library("torchtrim_test", "DEF")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x + 1, "CPU")
    with pytest.raises(Unsupported, match=r"mystery.*register_fake"):
        torch.ops.torchtrim_test.mystery(torch.randn(1000))


def test_it_ends_as_it_began() -> None:
    clone, compile_, save = torch.UntypedStorage.clone, torch.compile, torch.save
    with pytest.raises(RuntimeError, match="reduction dim"), dry_run(".", owned_only=True):
        torch.randn(30, 40) @ torch.randn(30, 40)
    assert current() is None
    assert (torch.UntypedStorage.clone, torch.compile, torch.save) == (clone, compile_, save)
    assert torch.ones(300).sum().item() == 300


def test_an_unknown_loss_is_finite(dry: Dry) -> None:
    loss = torch.randn(2000, 2000).square().mean()
    assert not dry.knows(loss)
    assert torch.isfinite(loss)
    assert loss.isfinite().item()
    assert not torch.isfinite(torch.tensor(float("inf")))


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [contextlib.nullcontext, Passing, Dispatching])
def test_lbfgs_fills_its_history(dry: Dry, around: Any) -> None:
    net = nn.Linear(300, 300)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=2)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = net(torch.randn(8, 300)).square().mean()
        assert not loss > 0
        loss.backward()
        return loss

    with around():
        optimizer.step(closure)
    assert calls == 4
    (group,), (state,) = optimizer.param_groups, optimizer.state.values()
    assert (len(state["old_dirs"]), group["tolerance_change"]) == (2, 1e-9)


def test_what_was_not_saved_is_not_renamed(dry: Dry, tmp_path: Path) -> None:
    new, last, other = (tmp_path / name for name in ("new.pt", "last.pt", "other"))
    torch.save({}, new)
    new.replace(last)
    last.rename(tmp_path / "best.pt")
    assert not [*tmp_path.iterdir()]
    other.write_text("its own")
    other.rename(new)
    assert new.read_text() == "its own"
