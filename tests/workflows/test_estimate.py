"""Estimates against measured peaks, on models of every kind; and what a person may hand over instead."""

from __future__ import annotations

import collections
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchtrim
from models import OPTIMIZERS, SAMPLES
from torchtrim import Inference, ScriptFailed, TrainStep, Unsupported, UsageError
from torchtrim.analysis.timeline import most_of
from torchtrim.capture.build import Setting
from torchtrim.planner.estimate import unused_bytes
from torchtrim.records.profile import Profile
from torchtrim.records.trial import Request
from torchtrim.runner.session import Session

HERE = Path(__file__).parent
EXACT = ("parameter", "gradient", "optimizer_state")
RANDOM_STATE = 6000
"""Bytes of a generator's state, which a checkpoint keeps and no operator makes."""


def measured(work: TrainStep | Inference) -> Profile:
    """The profile of a step that runs, after one of warm-up."""
    session = Session(
        Request(steps=0, warmup=1), Setting("cpu", "", str(Path.cwd())), trains=work.trains
    )
    session.watcher.optimizers.extend(work.optimizers)
    try:
        with session.watcher:
            for number in range(2):
                work.step(0)
                if not work.trains or number:
                    session.step_ends()
    finally:
        profile = session.finish().profile
    assert profile is not None
    return profile


def own_bytes(profile: Profile) -> int:
    """The peak without what else is alive in this process, such as what earlier tests have left."""
    return profile.peak_bytes - unused_bytes(profile)


def training(name: str, optimizer: str) -> TrainStep:
    torch.manual_seed(0)
    sample = SAMPLES[name]()
    return TrainStep(
        sample.model,
        lambda model, batch: sample.loss(),
        OPTIMIZERS[optimizer](sample.model.parameters()),
        (sample.inputs, sample.targets),
    )


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("mlp", "sgd"),
        ("encoder", "adam foreach"),
        ("resnet", "adam fused"),
        ("groupnorm", "adam single"),
        ("lstm", "adam foreach"),
        ("unet", "sgd"),
        ("tied", "adam foreach"),
        ("checkpointed", "sgd"),
        ("checkpointed reentrant", "adam fused"),
        ("inplace", "adam single"),
    ],
)
def test_a_training_step(name: str, optimizer: str) -> None:
    step = training(name, optimizer)
    found = torchtrim.estimate(step)
    real = measured(step)
    operators = [op.name for op in found.profile.operators]
    assert operators == [op.name for op in real.operators]
    assert found.profile.tracked_peak_bytes == real.tracked_peak_bytes
    checkpoints = 3 * RANDOM_STATE if name.startswith("checkpointed") else 0
    allowed = checkpoints + 0.05 * own_bytes(real)
    assert abs(own_bytes(found.profile) - own_bytes(real)) <= allowed
    for kind in EXACT:
        assert most_of(found.profile, kind) == most_of(real, kind)
    assert found.facts.parameter_bytes == sum(p.nbytes for p in step.model.parameters())
    assert sum(found.by_module.values()) == sum(found.by_kind.values()) == found.peak_bytes


def test_a_queue_that_fills_after_the_second_step() -> None:
    def peak(length: int) -> int:
        kept: collections.deque[torch.Tensor] = collections.deque(maxlen=length)

        def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            kept.append(model(batch))
            return kept[-1].square().mean()

        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters())
        return torchtrim.estimate(
            TrainStep(model, loss_of, optimizer, torch.ones(256, 64))
        ).peak_bytes

    assert peak(2) - peak(1) == 256 * 64 * 4


@pytest.mark.parametrize("name", ["mlp", "encoder", "resnet", "lstm", "tied"])
def test_an_inference_call(name: str) -> None:
    torch.manual_seed(0)
    sample = SAMPLES[name]()
    work = Inference(sample.model.eval(), sample.inputs)
    found = torchtrim.estimate(work)
    assert found.profile.tracked_peak_bytes == measured(work).tracked_peak_bytes
    assert found.facts.gradient_bytes == found.facts.optimizer_bytes == 0


def test_large_convolutions_with_their_workspace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    batch = torch.randn(4, 3, 48, 48), torch.randint(10, (4,))
    step = TrainStep(model, classified, torch.optim.SGD(model.parameters(), 0.1), batch)
    found = torchtrim.estimate(step)
    real = measured(step)
    assert own_bytes(real) > 1.1 * (real.tracked_peak_bytes - unused_bytes(real))
    assert own_bytes(found.profile) == pytest.approx(own_bytes(real), rel=0.05)


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_the_model_is_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 5)
    )
    optimizer = OPTIMIZERS["adam foreach"](model.parameters())
    step = TrainStep(
        model, classified, optimizer, (torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))
    )
    measured(step)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()
    tensors = {id(p): p.data_ptr() for p in model.parameters()}
    found = torchtrim.estimate(step)
    found.max_batch(found.peak_bytes + 100_000)
    assert all(torch.equal(v, before[0][k]) for k, v in model.state_dict().items())
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[k], v) for k, v in before[1]["state"][number].items())
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), random)
    assert {id(p): p.data_ptr() for p in model.parameters()} == tensors
    assert all(p.grad is None for p in model.parameters())


def test_it_is_as_it_was_after_a_failure() -> None:
    step = training("mlp", "sgd")
    state = copy.deepcopy(step.model.state_dict())

    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        (model(batch[0]).sum()).backward()
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        torchtrim.estimate(TrainStep(step.model, fails, step.optimizers[0], step.batch))
    assert all(torch.equal(v, state[k]) for k, v in step.model.state_dict().items())
    assert all(p.grad is None for p in step.model.parameters())
    assert torch.ones(3).sum().item() == 3


def test_a_function_makes_what_would_not_fit_here() -> None:
    def make() -> TrainStep:
        model = nn.Sequential(nn.Linear(2**17, 2**17), nn.ReLU(), nn.Linear(2**17, 10))
        batch = torch.randn(8, 2**17), torch.randint(10, (8,))
        return TrainStep(model, classified, torch.optim.Adam(model.parameters()), batch)

    found = torchtrim.estimate(make)
    parameters = 4 * (2**34 + 2**17 + 10 * 2**17 + 10)
    assert found.facts.parameter_bytes == found.facts.gradient_bytes == parameters
    assert found.facts.optimizer_bytes == 2 * parameters + 4 * 4
    assert found.peak_bytes > 4 * parameters
    assert not found.fits("80GiB")
    assert found.fits("1TiB")


@pytest.mark.parametrize("kind", ["training", "inference"])
def test_the_largest_batch_runs_within_the_budget_and_one_more_does_not(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 8))

    def at(size: int) -> TrainStep | Inference:
        batch = torch.randn(size, 64), torch.randint(8, (size,))
        if kind == "inference":
            return Inference(model, batch[0])
        return TrainStep(model, classified, torch.optim.Adam(model.parameters()), batch)

    found = torchtrim.estimate(at(16))
    budget = 9_000_000 + found.facts.unused_bytes
    size = found.max_batch(budget)
    del found
    assert size > 100
    assert measured(at(size)).peak_bytes <= budget < measured(at(size + 1)).peak_bytes


@pytest.mark.slow
def test_the_longest_sequence() -> None:
    torch.manual_seed(0)
    model = SAMPLES["tied"]().model

    def at(length: int) -> TrainStep:
        tokens = torch.randint(50, (4, length))

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return TrainStep(model, loss, optimizer, (tokens, tokens.clone()))

    found = torchtrim.estimate(at(8))
    budget = 2_000_000 + found.facts.unused_bytes
    length = found.max_sequence(budget)
    assert length > 16
    assert measured(at(length)).peak_bytes <= budget < measured(at(length + 1)).peak_bytes
    growth = found.grown("sequence", budget)
    assert growth.now == 8
    assert growth.peak_bytes is not None
    assert growth.next_bytes is not None
    assert growth.peak_bytes <= budget < growth.next_bytes


def test_a_length_that_the_model_does_not_take_ends_the_search_with_its_reason() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(20, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.positions[: x.shape[1]]

    growth = torchtrim.estimate(Inference(Positions(), torch.randn(2, 8, 16))).grown(
        "sequence", "1GiB"
    )
    assert growth.largest == 20
    assert growth.next_bytes is None
    assert growth.limited_by.startswith("RuntimeError: ")


def test_an_interrupted_search_can_be_repeated() -> None:
    interrupts: list[int] = []

    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] in interrupts:
                interrupts.clear()
                raise KeyboardInterrupt
            return x + 1

    found, fresh = (
        torchtrim.estimate(Inference(Interrupted(), torch.randn(4, 1000))) for _ in range(2)
    )
    budget = 200_000 + found.facts.unused_bytes
    size = fresh.max_batch(budget)
    assert size > 4
    interrupts.append(size)
    with pytest.raises(KeyboardInterrupt):
        found.max_batch(budget)
    assert found.max_batch(budget) == size


def test_no_batch_fits() -> None:
    found = torchtrim.estimate(training("mlp", "sgd"))
    growth = found.grown("batch", 500 + found.facts.unused_bytes)
    assert growth.largest == 0
    assert growth.peak_bytes is None
    assert growth.next_bytes is not None
    assert growth.next_bytes > growth.budget_bytes


def test_what_else_is_alive_is_told_and_takes_its_part_of_the_budget() -> None:
    before = torchtrim.estimate(training("mlp", "sgd"))
    other = torch.zeros(3_000_000)
    found = torchtrim.estimate(training("mlp", "sgd"))
    assert found.facts.unused_bytes - before.facts.unused_bytes >= other.nbytes
    assert own_bytes(found.profile) == own_bytes(before.profile)
    with pytest.raises(UsageError, match=r"not use hold .*in a fresh process"):
        found.max_batch(other.nbytes)


def test_the_batch_that_was_given_is_no_part_of_a_smaller_one() -> None:
    model = nn.Linear(1000, 10)
    found = torchtrim.estimate(Inference(model, torch.randn(3000, 1000)))
    growth = found.grown("batch", found.facts.unused_bytes + 5_000_000)
    alone = torchtrim.estimate(Inference(model, torch.randn(growth.largest, 1000)))
    assert growth.peak_bytes is not None
    assert growth.peak_bytes - growth.unused_bytes == own_bytes(alone.profile)


def test_memory_that_falls_as_the_sequence_grows() -> None:
    class InParts(nn.Module):
        """Scores of all tokens at once, of 8 at a time where there are more than 100."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = x.split(8, 1) if x.shape[1] > 100 else (x,)
            return torch.cat([(part @ x.transpose(1, 2)).softmax(-1) @ x for part in parts], 1)

    found = torchtrim.estimate(Inference(InParts(), torch.randn(8, 64, 8)))
    growth = found.grown("sequence", found.facts.unused_bytes + 220_000)
    assert growth.falls
    assert growth.largest > 100
    assert growth.tried > growth.largest
    assert growth.peak_bytes is not None
    assert growth.next_bytes is not None
    assert growth.peak_bytes <= growth.budget_bytes < growth.next_bytes


@pytest.mark.parametrize("device", ["emulated", "a10g", "h100"])
def test_a_device_that_is_not_there(device: str) -> None:
    step = training("encoder", "adam foreach")
    found = torchtrim.estimate(step, device=device)
    assert found.profile.device == ("emulated" if device == "emulated" else f"emulated {device}")
    assert found.reserved_bytes is not None
    assert found.reserved_bytes >= found.peak_bytes
    assert found.reserved_bytes % 2**21 == 0
    assert found.facts.parameter_bytes % 512 == 0
    assert "workspace" not in {kind for kind, size in found.by_kind.items() if size}
    assert {p.device.type for p in step.model.parameters()} == {"cpu"}


def test_a_model_that_moves_itself_to_a_device() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(300, 300)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cuda()
            return self.layer(x.to("cuda")).mean()

    found = torchtrim.estimate(Inference(Moves(), torch.randn(50, 300)), device="a10g")
    assert found.facts.parameter_bytes >= 300 * 301 * 4


def test_what_depends_on_values_has_a_bound_and_a_note() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y[y > 0].unique().sum() + (1 if y.max() > 3 else 2)

    work = Inference(Masked(), torch.randn(64, 32))
    found = torchtrim.estimate(work)
    assert found.peak_bytes >= measured(work).peak_bytes
    assert any("boolean index" in note for note in found.notes)
    assert any("condition" in note for note in found.notes)
    assert all(note.startswith("tests/workflows/test_estimate.py:") for note in found.notes)


def test_compiled_models_are_counted_as_written_and_it_says_so() -> None:
    def make() -> Inference:
        return Inference(torch.compile(nn.Linear(100, 100)), torch.randn(50, 100))

    found = torchtrim.estimate(make)
    assert found.peak_bytes >= (100 * 101 + 50 * 100 * 2) * 4
    assert any("torch.compile" in note for note in found.notes)


def test_a_module_that_was_compiled_before() -> None:
    model = nn.Sequential(nn.Linear(100, 100))
    model[0].compile()
    found = torchtrim.estimate(Inference(model, torch.randn(50, 100)))
    assert any(note.startswith("Linear: compiled") for note in found.notes)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (nn.Linear(3, 3), r"torchtrim\.Inference\(model, inputs\)"),
        ("train.py", "Script"),
        (lambda: nn.Linear(3, 3), "the function returned Linear"),
        (lambda: None, "the function returned NoneType"),
    ],
)
def test_what_is_no_workload(argument: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        torchtrim.estimate(argument)


def test_a_model_on_another_device_is_to_be_made_in_a_function() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(UsageError, match=r"2 of the model's tensors are on meta.*lambda"):
        torchtrim.estimate(Inference(model, torch.randn(2, 3)))


def test_a_lazy_model() -> None:
    with pytest.raises(Unsupported, match="lazy"):
        torchtrim.estimate(Inference(nn.LazyLinear(3), torch.randn(2, 3)))


@pytest.mark.parametrize("device", ["cuda", "gtx9999", ""])
def test_a_device_that_nobody_knows(device: str) -> None:
    with pytest.raises(UsageError, match="an estimate is for"):
        torchtrim.estimate(training("mlp", "sgd"), device=device)


@pytest.mark.parametrize("memory", ["lots", "-3GiB", "0", "50%"])
def test_an_amount_that_is_none(memory: str) -> None:
    with pytest.raises(UsageError):
        torchtrim.estimate(training("mlp", "sgd")).fits(memory)


def test_a_batch_that_cannot_grow() -> None:
    found = torchtrim.estimate(Inference(nn.Linear(3, 3), torch.randn(3)))
    with pytest.raises(UsageError, match="sequence"):
        found.max_sequence("1GiB")


def test_a_script_is_estimated_as_it_is_measured() -> None:
    script = torchtrim.Script(str(HERE.parents[0] / "scripts" / "plain.py"))
    found = torchtrim.estimate(script)
    assert found.peak_bytes == pytest.approx(torchtrim.record(script).peak_bytes, rel=0.02)


def test_a_script_that_fails() -> None:
    with pytest.raises(ScriptFailed):
        torchtrim.estimate(
            torchtrim.Script(str(HERE.parents[0] / "scripts" / "plain.py"), ("--nothing",))
        )


def test_a_script_writes_no_checkpoint(tmp_path: Path) -> None:
    kept = tmp_path / "weights.pt"
    kept.write_bytes(b"precious")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(9):\n"
        "    model(torch.randn(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        f"    torch.save(model.state_dict(), {str(kept)!r})\n"
    )
    found = torchtrim.estimate(torchtrim.Script(str(script)))
    assert kept.read_bytes() == b"precious"
    assert any("nothing was written" in note for note in found.notes)
