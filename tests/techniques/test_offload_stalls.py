"""Predicted stalls are those of the emulated run, by a clock that shares no code with the simulator."""

from __future__ import annotations

import pytest
import torch
from bench.offload import MODELS, every, is_never_slower, joint, priced, recorded, squared, stalls
from tests.cases.clock import DeviceClock, clocked, seconds_of
from torch import nn

import torchtrim
from torchtrim.analysis.prices import device_of
from torchtrim.capture.workload import TrainStep
from torchtrim.emulator import emulate
from torchtrim.records.plan import Technique
from torchtrim.step.links import stall_in_parts
from torchtrim.step.optimizers import chunked, optimizer_calls
from torchtrim.techniques.offload_activations.technique import TECHNIQUE
from torchtrim.techniques.offload_optimizer.technique import TECHNIQUE as OF_OPTIMIZER

QUICK = ("mlp", "convolutions")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_predicted_stalls_are_those_that_a_clock_sees(name: str) -> None:
    profile = recorded(MODELS[name])
    step = priced(profile)
    where = tuple(every(step))
    waiting = tuple(every(step, TECHNIQUE.options(step)[::-1]))
    assert where
    for chosen in (where, where[::2], waiting):
        found = stalls(MODELS[name], profile, chosen)
        assert found.copies[0] == found.copies[1] == 2 * len(chosen)
        assert found.predicted == pytest.approx(found.clocked, rel=0.05, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_all_techniques_is_never_slower_than_one_of_a_kind(name: str) -> None:
    rows = joint(recorded(MODELS[name]))
    assert rows
    for row in rows:
        assert is_never_slower(row), row
        assert row["bound"] <= row["joint"] + 1e-12


def test_an_optimizer_in_parts_awaits_its_copies_as_long_as_predicted() -> None:
    def workload() -> TrainStep:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
        return TrainStep(model, squared, optimizer, torch.randn(8, 256, device="cuda"))

    most = 300_000
    with emulate():
        work = workload()
        work.step(0)
        profile = torchtrim.record(work)
    step, link = priced(profile), device_of(profile).link
    ((seen,),) = optimizer_calls(step).values()
    updates = seen.step.updates
    sizes = [step.tensors[update.parameter].bytes for update in updates]
    chunks = chunked(updates, sizes, most)
    own = sum(step.tasks[task].seconds for task in range(*seen.span))
    parts = [
        sum(step.tensors[state].bytes for update in chunk for state in updates[update].states)
        for chunk in chunks
    ]
    shares = [sum(sizes[update] for update in chunk) / sum(sizes) for chunk in chunks]
    predicted = stall_in_parts([part / link for part in parts], [own * one for one in shares])
    names = [operator.name for operator in profile.operators]
    seconds = seconds_of(names, [task.seconds for task in step.tasks])
    clock = DeviceClock(seconds, link, 0.0, elements=sum(sizes) // 4)
    with emulate(streams="early") as emulation:
        work = workload()
        (optimizer,) = work.optimizers
        options = {"chunk_bytes": most}
        OF_OPTIMIZER.apply(
            {"SGD": optimizer}, Technique(name=OF_OPTIMIZER.name, where=("SGD",), options=options)
        )
        for number in range(2):
            work.step(number)
        with clocked(emulation, clock):
            work.step(2)
        torch.cuda.synchronize()
    assert len(chunks) > 2
    assert predicted == pytest.approx(clock.stall, rel=0.05)
