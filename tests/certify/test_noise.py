"""The test of rounding keeps its chance of error, sees what is a little larger, and tells chaos from both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchtrim
from torchtrim import TrainStep
from torchtrim.certify.noise import (
    ALL,
    CHANCE,
    STAGES,
    RoundingNoise,
    clear,
    factor,
    spread,
    spreads,
)
from torchtrim.evidence.evidence import keep_value
from torchtrim.records.trial import Request
from torchtrim.runner.perturbed import Perturbed, perturb
from torchtrim.runner.settings import precision
from torchtrim.workflows.verify import verify_pair

QUANTITIES = 40
VERDICTS = 10_000


def false_alarms(chance: float, seed: int) -> int:
    """Count verdicts on changes that only round, of so many quantities, each as far apart as runs are."""
    draws = torch.Generator().manual_seed(seed)
    sizes = torch.rand(QUANTITIES, generator=draws).mul(-30).exp()
    runs = torch.randn(ALL + 1, VERDICTS, QUANTITIES, generator=draws) * sizes
    undecided, alarms = torch.ones(VERDICTS, dtype=torch.bool), 0
    for seeds in STAGES:
        count = spreads(seeds)
        times = runs[0].abs() / runs[1 : count + 1].square().mean(0).sqrt()
        undecided &= (times > clear(seeds) * factor(QUANTITIES, ALL, chance)).any(1)
        beyond = undecided & (times > factor(QUANTITIES, count, chance)).any(1)
        undecided &= ~beyond
        alarms += int(beyond.sum())
    return alarms


def test_a_certificate_keeps_its_chance_of_error() -> None:
    """At 1 in 10,000 there is little to count, so also at 4 in 100."""
    assert false_alarms(CHANCE, 1) <= 6
    expected = 0.04 * VERDICTS
    assert 0.4 * expected <= false_alarms(0.04, 2) <= expected + 4 * expected**0.5


def kept(folder: Path, values: dict[str, torch.Tensor], names: list[str]) -> Path:
    folder.mkdir()
    for name, value in values.items():
        keep_value(folder / f"kept-{names.index(name)}", value)
    return folder


@pytest.mark.slow
def test_what_fewer_runs_let_through_all_runs_do(tmp_path: Path) -> None:
    """Of losses, and of updates behind the mask of gradients that are rounding alone.

    Gradients are as large as their rounding, or larger by up to 1e6, and updates are their signs, moved too.
    """
    owners, elements = 200, 12
    names = [f"0/{kind}:N.{n}" for n in range(owners) for kind in ("loss", "gradient", "parameter")]
    draws = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    sizes = torch.rand(owners, elements, generator=draws).mul(14).exp()
    plain = random(owners, elements).sign() * sizes * 1e-3
    far = torch.rand(owners, 1, generator=draws).mul(8).exp()

    def run(name: str, times: torch.Tensor | float) -> Path:
        moved = plain + random(owners, elements) * 1e-3 * (times > 0)
        updated = moved.sign() + random(owners, elements) * times * 1e-9
        values = {f"0/gradient:N.{n}": one for n, one in enumerate(moved)}
        values |= {f"0/parameter:N.{n}": one for n, one in enumerate(updated)}
        losses = 1 + random(owners, 1) * times * 1e-9
        values |= {f"0/loss:N.{n}": one for n, one in enumerate(losses)}
        return kept(tmp_path / name, values, names)

    noise = RoundingNoise(names, run("plain", 0.0), run("other", far))
    moved = {seed: run(str(seed), 1.0) for seed in STAGES[-1]}
    within = {one.name for one in noise.judged(moved, {}) if not one.beyond}
    for seeds in STAGES[:-1]:
        some = noise.judged({seed: moved[seed] for seed in seeds}, {}, ALL)
        let_through = {one.name for one in some if one.gap <= clear(seeds) * one.bound}
        updates = {name for name in let_through if "parameter" in name}
        assert let_through <= within
        assert 0.1 * owners < len(updates) < 0.9 * owners


def test_the_tail_is_students() -> None:
    """Against tables: two-sided t of 1, 3 and 5 degrees of freedom at 1e-3 are 636.6, 12.92 and 6.869."""
    for runs, table in ((1, 636.6), (3, 12.92), (5, 6.869)):
        found = factor(1, runs, len(STAGES) * 1e-3)
        assert table <= found * 1.001 <= 1.05 * table


def test_a_run_and_its_opposite_count_once() -> None:
    assert spread({1: 3.0, -1: 1.0, 2: 3.0}) == 3.0


def test_results_move_by_one_unit_and_whole_numbers_stay() -> None:
    values = torch.linspace(0.1, 0.9, 1000, dtype=torch.float64)
    with Perturbed(1):
        one, counts = values * 1.5, torch.ones(5, dtype=torch.float64) + 1
    with Perturbed(-1):
        other = values * 1.5
    gaps = (one / (values * 1.5) - 1).abs()
    assert float(gaps.min()) > 0
    assert float(gaps.max()) <= 2**-51
    assert torch.equal(counts, torch.full((5,), 2.0, dtype=torch.float64))
    assert bool((torch.sign(one - values * 1.5) == -torch.sign(other - values * 1.5)).all())


@pytest.mark.parametrize("of", [torch.complex64, torch.complex128])
def test_complex_numbers_move_in_both_parts(of: torch.dtype) -> None:
    values = torch.full((4, 1000), 0.3 + 0.7j, dtype=of)
    with Perturbed(1):
        moved = values * 1.1
        columns = values[:, ::2] * 1.1
    eps = torch.finfo(of).eps
    for result, plain in ((moved, values * 1.1), (columns, values[:, ::2] * 1.1)):
        for part, exact in ((result.real, plain.real), (result.imag, plain.imag)):
            units = (part / exact - 1).div(eps).round()
            assert {*units.sign().unique().tolist()} == {-1.0, 1.0}
            assert units.abs().max() <= 2  # the quotient is rounded too
    assert Perturbed(1).moved(values.conj()).equal(values.conj())


def test_infinities_stay() -> None:
    scores = torch.linspace(0.1, 0.9, 100_000, dtype=torch.float64)
    scores[[7, 70_001]] = -torch.inf
    for seed in (1, -1):
        with Perturbed(seed):
            shares = scores.softmax(-1)
            moved = scores * 1.5
        assert bool(shares.isfinite().all())
        assert int(moved.isinf().sum()) == 2


def test_inputs_of_sums_move_by_more_and_statistics_are_still_written() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4).double()
    values = torch.randn(64, 4, dtype=torch.float64)
    with Perturbed(1):
        summed = (values - values.mean()).sum()
        norm(values)
    assert abs(float(summed)) < 1e-10
    assert norm.running_mean is not None
    assert float(norm.running_mean.abs().max()) > 0


def test_distributed_tensors_move_in_their_parts() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        values = torch.linspace(0.1, 0.9, 64, dtype=torch.float64)
        layer = nn.Module()
        layer.weight = nn.Parameter(DTensor.from_local(values.clone(), mesh, [Shard(0)]))
        with Perturbed(1):
            scaled = (layer.weight * 1.5).to_local()
        perturb(layer, 1, lambda value: value)
    finally:
        dist.destroy_process_group()
    for one, other in ((scaled, values * 1.5), (layer.weight.to_local(), values)):
        assert bool((one != other).all())
        torch.testing.assert_close(one, other, rtol=1e-15, atol=0.0)


def test_equal_modules_are_perturbed_alike() -> None:
    nets = [nn.Linear(3, 3), nn.Linear(3, 3)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        perturb(net, 2, lambda value: value)
    assert torch.equal(nets[0].weight, nets[1].weight)


def model(
    optimizer: str, loss: Callable[[torch.Tensor], torch.Tensor], late: float = 0.0
) -> TrainStep:
    """A model with a bias before a norm, whose gradient is rounding alone."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    kinds = {"AdamW": torch.optim.AdamW, "Rprop": torch.optim.Rprop}
    options = {"weight_decay": 0.01 + late} if optimizer == "AdamW" else {}
    made = kinds[optimizer](net.parameters(), 1e-2, **options)
    return TrainStep(net, lambda net, x: loss(net(x)), made, torch.randn(32, 6))


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


def otherwise(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).sum() / x.numel()


@pytest.mark.parametrize("optimizer", ["AdamW", "Rprop"])
@pytest.mark.slow
def test_a_gradient_that_is_rounding_hides_no_fault(optimizer: str) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return otherwise(x) * (1 + 1e-7)

    sound = torchtrim.verify(model(optimizer, plain), model(optimizer, otherwise))
    assert sound.verdict in ("ROUNDING", "BITWISE"), sound.reason
    found = torchtrim.verify(model(optimizer, plain), model(optimizer, wrong))
    assert found.verdict == "NOT EQUAL"
    if sound.sees:
        assert max(sound.sees.values()) < 1e-9


def test_one_perturbed_run_decides_on_a_sum_in_another_order() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        return sum(row.square().sum() for row in x) / x.numel()  # type: ignore[return-value]

    said: list[str] = []
    steps = (model("AdamW", loss) for loss in (plain, rows))
    request = Request(steps=1, measured=False)
    found = verify_pair(*steps, request, progress=said.append).report.certificate
    assert found is not None
    assert found.verdict == "ROUNDING"
    assert said.count("looking closer, in float64: step 1 of 3") == 3


def test_an_update_is_compared_where_gradients_are_more_than_rounding() -> None:
    found = torchtrim.verify(model("AdamW", plain), model("AdamW", otherwise, late=1e-4))
    assert found.verdict == "NOT EQUAL"


def test_a_chaotic_original_is_undecided_and_its_operator_named() -> None:
    def step(update: Callable[[torch.Tensor], torch.Tensor]) -> TrainStep:
        class Map(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = torch.sigmoid(self.layer(x))
                for _ in range(60):
                    x = update(x)
                return x

        torch.manual_seed(0)
        net = Map()
        optimizer = torch.optim.SGD(net.parameters(), 0.0)
        return TrainStep(net, lambda net, x: net(x).mean(), optimizer, torch.randn(4, 4))

    found = torchtrim.verify(
        step(lambda x: 3.99 * x * (1 - x)), step(lambda x: 3.99 * x - 3.99 * x * x)
    )
    assert found.verdict == "UNDECIDED"
    assert "first visible after aten::mul" in found.reason
    assert "test_noise.py" in found.reason


def test_complex_draws_are_those_of_narrow_numbers() -> None:
    torch.manual_seed(0)
    narrow = torch.randn(5, dtype=torch.complex64)
    torch.manual_seed(0)
    with Perturbed(0):
        drawn = torch.randn(5, dtype=torch.complex128)
    assert drawn.dtype is torch.complex128
    assert drawn.equal(narrow.to(torch.complex128))


def test_float64_draws_are_those_of_float32() -> None:
    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        masked = nn.functional.dropout(torch.ones(50), 0.5)
        return [torch.rand(20), layer.weight.detach(), masked, torch.bernoulli(torch.rand(9))]

    plain = drawn()
    torch.set_default_dtype(torch.float64)
    try:
        with precision(double=True, nudged=0):
            wide = drawn()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(plain, wide, strict=True):
        assert other.dtype is torch.float64
        assert torch.equal(one.double(), other)


def test_backward_passes_by_a_moved_input() -> None:
    value = torch.rand(8, dtype=torch.float64, requires_grad=True)
    moved = Perturbed(1).moved(value)
    moved.sum().backward()
    assert not torch.equal(moved, value)
    assert value.grad is not None
    assert bool((value.grad == 1).all())
