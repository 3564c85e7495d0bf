"""Parts of the batch are planned, predicted and certified, and go with what they can go with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import torchtrim
from capture.loops import record
from steps import encoder, fitting, squared, train_step
from torchtrim.dryrun.workspace import needed
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Option, names, technique
from torchtrim.planner.pins import overlap
from torchtrim.planner.planner import Planner
from torchtrim.records.plan import Technique
from torchtrim.records.trial import Trial
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Span, Step
from torchtrim.techniques import precision
from torchtrim.techniques.micro_batch.technique import TECHNIQUE


@pytest.fixture(scope="module")
def observed() -> tuple[torchtrim.TrainStep, Trial]:
    torch.manual_seed(0)
    step = train_step(encoder(32, 3), torch.randn(16, 48, 32), "SGD")
    return step, fitting(step).observe()


def planner_of(observed: tuple[torchtrim.TrainStep, Trial], *techniques: str) -> Planner:
    _, found = observed
    assert found.profile is not None
    return Planner(
        found.profile,
        step_seconds=found.seconds,
        fingerprint=found.fingerprint,
        exclude=[name for name in names() if name not in techniques],
        allow="ROUNDING",
    )


@pytest.mark.slow
def test_it_is_planned_and_certified(observed: tuple[torchtrim.TrainStep, Trial]) -> None:
    step, _ = observed
    planner = planner_of(observed, "micro_batch")
    assert planner.floor.outcome.peak_bytes < 0.45 * planner.simulated_original
    where = type(step.model).__name__
    with torchtrim.fit(
        step, "60%", steps=2, allow="ROUNDING", pins={"micro_batch": [where]}
    ) as fitted:
        assert {one.name for one in fitted.plan.techniques} >= {"micro_batch"}
        assert fitted.certificate is not None
        assert fitted.certificate.verdict in ("BITWISE", "ROUNDING")
        assert fitted.certificate.reason


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 4, 16])
def test_the_peak_is_predicted(observed: tuple[torchtrim.TrainStep, Trial], parts: int) -> None:
    step, trial = observed
    assert trial.profile is not None
    recorded = step_of(trial.profile)
    where = type(step.model).__name__
    option = Option("micro_batch", where, spans_of(recorded, where), None, (("parts", parts),))
    edit = TECHNIQUE.edits(recorded, option)
    assert edit is not None
    predicted = simulate(recorded, [edit]).peak_bytes
    handle = TECHNIQUE.apply({where: step.model}, plan_of(where, parts))
    measured = fitting(step).observe().peak_bytes
    handle.revert()
    assert measured < trial.peak_bytes
    assert abs(predicted - measured) <= 0.015 * measured


@pytest.mark.parametrize(
    ("make", "shape", "parts"),
    [
        (lambda: nn.Conv3d(4, 4, 3, padding=1), (2, 4, 8, 8, 16), 2),
        (lambda: nn.Conv2d(4, 4, 3, padding=1), (3, 4, 32, 32), 2),
        (lambda: nn.Conv1d(4, 4, 3, padding=1), (4, 4, 512), 4),
        (lambda: nn.ConvTranspose2d(4, 4, 3, stride=2), (2, 4, 16, 16), 2),
        (lambda: nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True), (8, 192, 16), 8),
    ],
)
def test_scratch_of_a_part_is_that_of_its_own_kernel(
    make: Callable[[], nn.Module], shape: tuple[int, ...], parts: int
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(make(), nn.LeakyReLU(0.1))
    step = train_step(net, torch.randn(shape), "SGD")
    trial = fitting(step).observe()
    assert trial.profile is not None
    recorded = step_of(trial.profile)
    spans = spans_of(recorded, "Sequential")
    edit = TECHNIQUE.edits(
        recorded, Option("micro_batch", "Sequential", spans, None, (("parts", parts),))
    )
    assert edit is not None
    predicted = simulate(recorded, [edit]).peak_bytes
    TECHNIQUE.apply({"Sequential": net}, plan_of("Sequential", parts))
    measured = fitting(step).observe().peak_bytes
    assert abs(predicted - measured) <= 0.015 * measured


class Noisy(nn.Module):
    """Draws numbers like a tensor of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) * torch.rand_like(x)


class Twice(nn.Module):
    """Uses its layers on two parts of its input, so that each parameter has two gradients to add up."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.layers(part) for part in (x[:0], x)])


def by_hand(net: nn.Module, x: torch.Tensor, *, passes: int = 1, zeros: bool = False) -> None:
    """Steps whose gradients are gone or zero when they end, as where `zero_grad` begins the next."""
    for _ in range(3):
        loss = net(x).square().mean()
        for left in reversed(range(passes)):
            loss.backward(retain_graph=left > 0)
        with torch.no_grad():
            for one in net.parameters():
                assert one.grad is not None
                one -= 0.01 * one.grad
        net.zero_grad(set_to_none=not zeros)


@pytest.mark.parametrize(("kind", "zeros"), [(Noisy, False), (Twice, False), (Twice, True)])
def test_the_peak_by_hand_is_predicted_to_the_byte(kind: type[nn.Module], zeros: bool) -> None:
    torch.manual_seed(0)
    net, batch = nn.Sequential(kind(), kind()), torch.randn(512, 32)

    def loop() -> None:
        by_hand(net, batch, zeros=zeros)

    predicted = peak_in_parts(step_of(record(loop)), ["Sequential"])
    TECHNIQUE.apply({"Sequential": net}, plan_of("Sequential", 2))
    assert predicted == simulate(step_of(record(loop))).peak_bytes


def test_what_the_loss_saves_of_a_result_is_no_part_of_it() -> None:
    """A retained graph keeps the result for its next backward: the whole one, and none of its parts."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32), nn.Linear(32, 32))
    batch = torch.randn(512, 32)

    def loop() -> None:
        by_hand(net, batch, passes=2)

    predicted = peak_in_parts(step_of(record(loop)), ["Sequential"])
    TECHNIQUE.apply({"Sequential": net}, plan_of("Sequential", 2))
    assert predicted == simulate(step_of(record(loop))).peak_bytes


def peak_in_parts(step: Step, where: Sequence[str]) -> int:
    """The predicted peak with these modules in two parts."""
    options = (
        Option("micro_batch", one, spans_of(step, one), None, (("parts", 2),)) for one in where
    )
    edits = [TECHNIQUE.edits(step, option) for option in options]
    return simulate(step, [edit for edit in edits if edit is not None]).peak_bytes


@pytest.mark.slow
def test_several_under_autocast_are_predicted() -> None:
    torch.manual_seed(0)
    net, batch = encoder(32, 3), torch.randn(16, 48, 32)
    root = type(net).__name__
    half: dict[str, str | int | float | bool] = {"of": "compute", "dtype": "bfloat16"}
    precision.TECHNIQUE.apply({root: net}, Technique(name="precision", where=(root,), options=half))
    step = train_step(net, batch, "SGD")
    recorded = step_of(torchtrim.record(step))
    layers = [f"{root}.layers.{number}" for number in range(3)]
    predicted = peak_in_parts(recorded, layers)
    for one in layers:
        TECHNIQUE.apply({root: net}, plan_of(one, 2))
    over = predicted - torchtrim.record(step).peak_bytes
    assert -0.005 * predicted <= over <= shrinking_blocks(16 * 48) + 0.005 * predicted


def test_a_call_without_a_tensor_in_sight_is_refused() -> None:
    class Takes(nn.Linear):
        def forward(self, given: Iterator[torch.Tensor]) -> torch.Tensor:
            return super().forward(next(given))

    model = Takes(6, 4)
    handle = TECHNIQUE.apply({"Takes": model}, plan_of("Takes", 2))
    with pytest.raises(ApplyFailed, match="called without a tensor"):
        model(iter([torch.ones(8, 6)]))
    handle.revert()
    model(iter([torch.ones(8, 6)]))


def test_gradients_that_arrive_are_of_a_part() -> None:
    """Backward of a block that ends in a Linear begins with a product of that gradient and a weight."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(3))
    step = train_step(nn.Sequential(*blocks), torch.randn(512, 32), "SGD")
    step.step(0)
    recorded = step_of(torchtrim.record(step))
    where = [f"Sequential.{number}" for number in range(3)]
    predicted = peak_in_parts(recorded, where)
    for one in where:
        TECHNIQUE.apply({"Sequential": step.model}, plan_of(one, 2))
    step.step(0)
    assert predicted == pytest.approx(torchtrim.record(step).peak_bytes, rel=0.005)


def shrinking_blocks(samples: int) -> int:
    """By how much this processor's blocks of a weight's gradient shrink with half of the samples.

    With AMX they do; a plan takes them to stay as they are.
    """
    whole, half = (scratch(samples // parts) for parts in (1, 2))
    return max(whole - samples // 2 * 32 * 2 - half, 0)


def scratch(samples: int) -> int:
    """What the product for a weight's gradient takes besides its result."""
    gradient, given = (torch.ones(samples, width, dtype=torch.bfloat16) for width in (32, 64))
    return needed(lambda: torch.mm(gradient.t(), given))


def spans_of(step: Any, where: str) -> tuple[Span, ...]:
    return tuple(c.span for c in step.calls if step.modules[c.module].path == where)


def plan_of(where: str, parts: int) -> Technique:
    return Technique(name="micro_batch", where=(where,), options={"parts": parts})


@pytest.mark.parametrize("other", ["recompute", "replay", "optimizer_in_backward"])
def test_what_changes_the_same_module_excludes_it(
    observed: tuple[torchtrim.TrainStep, Trial], other: str
) -> None:
    _, trial = observed
    assert trial.profile is not None
    recorded = step_of(trial.profile)
    mine = [TECHNIQUE.edits(recorded, option) for option in TECHNIQUE.options(recorded)]
    unit = technique(other)
    theirs = [unit.edits(recorded, option) for option in unit.options(recorded)]
    claims = [[c for edit in edits if edit for c in edit.claims] for edits in (mine, theirs)]
    assert all(claims)
    assert overlap(claims[0][:2], claims[1])


@pytest.mark.slow
def test_an_optimizer_that_takes_less_goes_with_it() -> None:
    torch.manual_seed(0)
    net = encoder(32, 3)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    step = torchtrim.TrainStep(net, squared, optimizer, torch.randn(16, 48, 32))
    where = type(net).__name__
    state = copy.deepcopy(net.state_dict())
    handles = [
        TECHNIQUE.apply({where: net}, plan_of(where, 4)),
        technique("plain_optimizer").apply(
            {"AdamW": optimizer},
            Technique(
                name="plain_optimizer",
                where=("AdamW",),
                options={"style": "chunks", "chunk_bytes": 1000},
            ),
        ),
    ]
    both = fitting(step).observe().peak_bytes
    for handle in handles:
        handle.revert()
    assert both < 0.6 * fitting(step).observe().peak_bytes
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def between_norms() -> torch.nn.Sequential:
    """Most of what is kept is between two BatchNorms, and all that is not is a tenth of it."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.LeakyReLU(0.2, inplace=True),
        torch.nn.Upsample(scale_factor=2),
        torch.nn.Conv2d(4, 4, 3, padding=1),
        torch.nn.Tanh(),
        torch.nn.AvgPool2d(4),
        torch.nn.BatchNorm2d(4),
    )


def test_what_is_between_norms_runs_in_parts() -> None:
    """The range begins behind what writes to its input, and is planned, predicted and equal."""
    torch.manual_seed(0)
    step = train_step(between_norms(), torch.randn(8, 3, 32, 32), "SGD")
    trial = fitting(step).observe()
    assert trial.profile is not None
    recorded = step_of(trial.profile)
    options = [o for o in TECHNIQUE.options(recorded) if dict(o.settings)["parts"] == 4]
    option = next(one for one in options if one.where == "Sequential[3:7]")
    edit = TECHNIQUE.edits(recorded, option)
    assert edit is not None
    predicted = simulate(recorded, [edit]).peak_bytes
    with torchtrim.fit(
        step, "75%", steps=2, allow="ROUNDING", pins={"micro_batch": [option.where]}
    ) as fitted:
        assert fitted.certificate is not None
        assert fitted.certificate.verdict in ("BITWISE", "ROUNDING")
    handle = TECHNIQUE.apply({"Sequential": step.model}, plan_of(option.where, 4))
    measured = fitting(step).observe().peak_bytes
    handle.revert()
    assert measured < 0.75 * trial.peak_bytes
    assert abs(predicted - measured) <= 0.05 * measured


class Codes(torch.nn.Module):
    """Writes a buffer from the whole batch, as a codebook that follows its means."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * 2


def test_what_writes_its_buffers_is_not_offered() -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)]
    net = torch.nn.Sequential(*layers[:2], Codes(), *layers[2:])
    recorded = step_of(torchtrim.record(train_step(net, torch.randn(64, 32), "SGD")))
    places = {option.where for option in TECHNIQUE.options(recorded)}
    assert "Sequential" not in places
    assert places >= {"Sequential[0:2]", "Sequential[3:5]"}


def test_techniques_share_a_chain() -> None:
    """Ranges of a Sequential that are not the same stay when others go, in any order."""
    torch.manual_seed(0)
    model, data = between_norms(), torch.randn(8, 3, 16, 16)
    recompute = technique("recompute")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        squared(model, data).backward()
        return [p.grad.clone() for p in model.parameters()]

    before = gradients()
    for order in (1, -1):
        handles = [
            TECHNIQUE.apply({"Net": model}, plan_of("Net[3:7]", 4)),
            recompute.apply({"Net": model}, Technique(name="recompute", where=("Net[0:2]",))),
        ]
        for handle in handles[::order]:
            for one, two in zip(before, gradients(), strict=True):
                assert torch.allclose(one, two, rtol=1e-4, atol=1e-6)
            handle.revert()
        assert type(model) is torch.nn.Sequential
    with pytest.raises(ApplyFailed, match="overlaps"):
        TECHNIQUE.apply(
            {"Net": model},
            Technique(name="micro_batch", where=("Net[0:2]", "Net[1:3]"), options={"parts": 2}),
        )
    assert type(model) is torch.nn.Sequential


class Popping(nn.Module):
    """Takes the labels out of its batch, so that the script finds it without."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        return self.head(batch["x"]) * labels


def test_a_batch_that_a_call_changes_is_changed() -> None:
    net = Popping()
    first, second = ({"x": torch.ones(8, 8), "labels": torch.ones(8, 1)} for _ in range(2))
    expected = net(first)
    parts = Technique(name="micro_batch", where=("Popping",), options={"parts": 4})
    TECHNIQUE.apply({"Popping": net}, parts)
    assert torch.equal(net(second), expected)
    assert list(second) == ["x"]


def two_graphs(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    squared(model, batch).backward()
    return squared(model, batch)


def one_graph(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = squared(model, batch)
    loss.backward(retain_graph=True)
    return loss * 0.5


def one_graph_at_once(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = squared(model, batch)
    loss.backward(retain_graph=True)
    return loss


def two_losses_of_one_graph(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    made = model(batch)
    first, second = made.square().mean(), made.tanh().mean()
    first.backward(retain_graph=True)
    return second


@pytest.mark.parametrize("name", ["micro_batch", "split_matmul"])
@pytest.mark.parametrize(
    "loss_of", [two_graphs, one_graph, one_graph_at_once, two_losses_of_one_graph]
)
def test_two_backwards_are_predicted(name: str, loss_of: Callable[..., torch.Tensor]) -> None:
    """Each backward reruns the parts; their gradients of parameters have their full size."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(3))
    net = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    step = torchtrim.TrainStep(net, loss_of, optimizer, torch.randn(128, 64))
    step.step(0)
    recorded = step_of(torchtrim.record(step))
    where = [f"Sequential.{number}" for number in range(3)]
    edits = []
    for one in where:
        option = Option(name, one, spans_of(recorded, one), None, (("parts", 8),))
        edits.append(technique(name).edits(recorded, option))
    predicted = simulate(recorded, [edit for edit in edits if edit is not None]).peak_bytes
    planned = Technique(name=name, where=tuple(where), options={"parts": 8})
    technique(name).apply({"Sequential": net}, planned)
    step.step(0)
    assert predicted == pytest.approx(torchtrim.record(step).peak_bytes, rel=0.002)


def test_a_packed_sequence_has_no_rows_of_samples() -> None:
    layer = nn.GRU(6, 4)
    packed = pack_padded_sequence(torch.randn(5, 3, 6), [5, 3, 2])
    right = layer(packed)[0].data
    handle = TECHNIQUE.apply(
        {"Net": layer}, Technique(name="micro_batch", where=("Net",), options={"parts": 2})
    )
    with pytest.raises(ApplyFailed, match="cannot run in parts of the batch"):
        layer(packed)
    handle.revert()
    assert torch.equal(layer(packed)[0].data, right)


class Checkpointed(nn.Module):
    """A block with a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return x + made


@pytest.mark.parametrize("parts", [2, 8])
def test_a_checkpoint_of_the_program_reruns_in_parts(parts: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Checkpointed() for _ in range(3)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    step = torchtrim.TrainStep(net, squared, optimizer, torch.randn(512, 64))
    step.step(0)
    recorded = step_of(torchtrim.record(step))
    where = tuple(f"Sequential.{number}" for number in range(3))
    options = (
        Option("micro_batch", one, spans_of(recorded, one), None, (("parts", parts),))
        for one in where
    )
    edits = [edit for edit in (TECHNIQUE.edits(recorded, one) for one in options) if edit]
    predicted = simulate(recorded, edits).peak_bytes
    assert predicted < 0.75 * simulate(recorded).peak_bytes
    planned = Technique(name="micro_batch", where=where, options={"parts": parts})
    TECHNIQUE.apply({"Sequential": net}, planned)
    step.step(0)
    assert predicted == pytest.approx(torchtrim.record(step).peak_bytes, rel=0.005)
