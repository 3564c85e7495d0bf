"""Verdicts on loaders that are really read, by a clock that is theirs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from data.machine import Machine
from profiles import Step
from torchtrim.analysis.loaders import verdict
from torchtrim.core.clock import Clock
from torchtrim.data.model import Consumer
from torchtrim.data.parts import BatchSource, parts_of
from torchtrim.data.rebuild import settings_of
from torchtrim.records.loader import BatchParts, LoaderCost, LoaderSettings
from torchtrim.rules.registry import diagnose
from torchtrim.rules.tt301_loader_wait import check

SAMPLES = 8


@dataclass
class Time:
    """Passes where it is told to."""

    now: float = 0.0
    worked: float = 0.0

    def waits(self, seconds: float) -> None:
        self.now += seconds

    def works(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.worked, lambda: self.worked)


@dataclass
class Case:
    """A loader, per sample and batch in seconds; its step with the batch there; and the verdict."""

    kind: str | None
    read: float = 0.0
    decode: float = 0.0
    collate: float = 0.0
    hand: float = 0.0
    step: float = 0.1
    workers: int = 0
    cores: int = 4
    streams: bool = False
    time: Time = field(default_factory=Time)


class Mapped(Dataset[Tensor]):
    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: Any) -> Tensor:
        self.case.time.waits(self.case.read)
        self.case.time.works(self.case.decode)
        return torch.rand(4)


class Streamed(IterableDataset[Tensor]):
    def __init__(self, case: Case) -> None:
        self.source = Mapped(case)

    def __iter__(self) -> Any:
        return (self.source[number] for number in range(64))


def parts_in(case: Case) -> BatchParts:
    """The parts of a batch, as they are found by reading one."""

    def collate(samples: list[Tensor]) -> Any:
        case.time.works(case.collate)
        return default_collate(samples)

    dataset: Any = Streamed(case) if case.streams else Mapped(case)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=SAMPLES, collate_fn=collate)
    found = parts_of(BatchSource.of(loader), case.time.clock)
    assert found is not None
    assert found.samples == SAMPLES
    assert found.reading == pytest.approx(SAMPLES * case.read)
    assert found.decoding == pytest.approx(SAMPLES * case.decode)
    assert found.collating == pytest.approx(case.collate)
    return replace(found, handing=case.hand)


def cost_in(case: Case) -> LoaderCost:
    parts, settings = parts_in(case), LoaderSettings(workers=case.workers)
    step = Machine(parts, Consumer(case.step), case.cores).rate(settings)
    return LoaderCost(
        step_seconds=step,
        ready_seconds=case.step,
        waited_seconds=max(step - case.step, 0.0),
        cores=case.cores,
        settings=settings,
        parts=parts,
        path="train.py",
        line=7,
    )


CASES = {
    "nothing to speak of": Case(None, read=0.0001, decode=0.0001),
    "hidden by a worker": Case(None, read=0.005, workers=1),
    "hidden by two workers": Case(None, decode=0.02, workers=2),
    "reads slowly": Case("reading", read=0.05),
    "reads slowly, a stream": Case("reading", read=0.05, streams=True),
    "reads slowly for a quick step": Case("reading", read=0.05, step=0.001),
    "reads slowly on one core": Case("reading", read=0.05, cores=1),
    "reads slowly with a worker a core": Case("reading", read=0.5, workers=4),
    "decodes slowly": Case("decoding", decode=0.05),
    "decodes slowly, a stream": Case("decoding", decode=0.05, streams=True),
    "decodes slowly on one core": Case("decoding", decode=0.05, cores=1),
    "decodes slowly with a worker a core": Case("decoding", decode=0.5, workers=4),
    "decodes more than it reads": Case("decoding", read=0.01, decode=0.05),
    "collates slowly": Case("collating", collate=0.4),
    "collates slowly, a stream": Case("collating", collate=0.4, streams=True),
    "collates slowly with a worker a core": Case("collating", collate=4.0, workers=4),
    "too few workers that read": Case("few workers", read=0.05, workers=1),
    "too few workers that decode": Case("few workers", decode=0.1, workers=1, cores=8),
    "too few workers by half": Case("few workers", read=0.1, workers=2, cores=16),
    "too many workers": Case("many workers", decode=0.1, workers=8, cores=2),
    "too many workers on one core": Case("many workers", decode=0.05, workers=4, cores=1),
    "huge samples": Case("handing over", decode=0.001, hand=0.2, workers=2),
    "huge samples that are read slowly": Case("handing over", read=0.01, hand=0.3, workers=4),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_on_a_constructed_loader(name: str) -> None:
    case = CASES[name]
    found = verdict(cost_in(case))
    assert (found.kind if found else None) == case.kind
    assert found is None or found.advice


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind])
def test_the_advice_never_has_more_workers_than_cores(name: str) -> None:
    cost = cost_in(CASES[name])
    found = verdict(cost)
    assert found is not None
    for workers in range(cost.cores + 1, 64):
        assert f"num_workers={workers}" not in found.advice


def test_samples_that_could_be_asked_for_at_once() -> None:
    rows = torch.utils.data.TensorDataset(torch.rand(64, 4), torch.arange(64))
    loader: DataLoader[Any] = DataLoader(rows, batch_size=8)
    parts = parts_of(BatchSource.of(loader))
    assert parts is not None
    assert parts.whole is not None
    slow = replace(parts, decoding=1.0, reading=0.0, whole=0.01)
    cost = LoaderCost(step_seconds=1.1, ready_seconds=0.1, waited_seconds=1.0, parts=slow, cores=2)
    found = verdict(cost)
    assert found is not None
    assert found.kind == "one by one"
    assert "BatchSampler" in found.advice


def test_a_data_set_that_draws_cannot_be_asked_at_once() -> None:
    parts = parts_in(Case(None))
    assert parts.whole is None


def test_a_data_set_that_cannot_be_read_apart() -> None:
    class Breaks(Dataset[Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            raise OSError("only in a worker")

    loader: DataLoader[Any] = DataLoader(Breaks(), batch_size=2, num_workers=1)
    assert parts_of(BatchSource.of(loader)) is None
    cost = LoaderCost(step_seconds=1.0, ready_seconds=0.1, waited_seconds=0.9, cores=2)
    found = verdict(cost)
    assert found is not None
    assert (found.kind, "num_workers=2" in found.advice) == ("unknown", True)
    assert "every core has a worker" in str(
        verdict(replace(cost, settings=LoaderSettings(workers=2)))
    )


def profile_with(cost: LoaderCost | None, device: str = "cpu") -> Any:
    step = Step(device)
    step.op("aten::addmm")
    step.wait(7.81, 0)
    return replace(step.profile(seconds=3.64), loader=cost)


def test_the_finding_has_the_price_and_the_line() -> None:
    (finding,) = check(profile_with(cost_in(CASES["reads slowly"])))
    assert (finding.path, finding.line) == ("train.py", 7)
    assert finding.price_ms == pytest.approx(400, rel=0.05)
    assert "the loader, without workers, costs 80%" in finding.message
    assert "waiting for data" in finding.message


def test_what_is_compared_counts_and_not_what_was_recorded() -> None:
    assert list(check(profile_with(cost_in(CASES["hidden by a worker"])))) == []


def test_no_step_waits_longer_than_it_takes() -> None:
    (finding,) = check(profile_with(None))
    assert "waits 7.81 s of 7.81 s (100%)" in finding.message


def test_a_loader_is_ranked_by_its_share_of_the_step_without_a_recorder() -> None:
    cost = LoaderCost(
        step_seconds=0.1, ready_seconds=0.078, waited_seconds=0.022, parts=parts_in(Case(None))
    )
    step = Step()
    weight = step.alive("parameter", 100)
    step.op("aten::mm", weight, makes=20)
    profile = replace(step.profile(seconds=10.0), loader=cost)
    found = diagnose(profile, ("TT301", "TT201"))
    assert found[0].code == "TT301" or found[0].price_bytes is not None


@pytest.mark.parametrize(
    ("gap", "waited", "workers", "price"),
    [(0.5, 0.2, 0, 0.2), (0.5, 0.2, 2, 0.5), (0.05, 0.01, 2, 0.01), (-0.1, 0.2, 0, 0.0)],
)
def test_a_price_is_no_noise(gap: float, waited: float, workers: int, price: float) -> None:
    cost = LoaderCost(
        step_seconds=1.0,
        ready_seconds=1.0 - gap,
        waited_seconds=waited,
        spread_seconds=0.1,
        settings=LoaderSettings(workers=workers),
    )
    assert cost.price == pytest.approx(price)


def test_settings_are_read_off_a_loader_and_its_loop() -> None:
    loader: DataLoader[Any] = DataLoader(Mapped(Case(None)), batch_size=4)
    assert settings_of(loader) == settings_of(iter(loader)) == LoaderSettings()
