"""The slab: what is offloaded shares one block of pinned memory, and whoever writes awaits who read there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench import offload
from torch import nn

import draws
import torchtrim
from steps import squared
from torchtrim.analysis.prices import device_of
from torchtrim.capture.workload import TrainStep
from torchtrim.emulator import emulate
from torchtrim.errors import ApplyFailed
from torchtrim.memory.packing import Buffer, pack
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.edits import ALIGNMENT, host_blocks, host_peak
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.step import Step
from torchtrim.techniques.offload_activations.moving import StorageMover, _Store
from torchtrim.techniques.offload_activations.places import place_of, placed, written
from torchtrim.techniques.offload_activations.technique import TECHNIQUE
from torchtrim.techniques.offload_activations.windows import edit_of

ORDERS = draws.orders(20)
EVERY = pytest.mark.parametrize("order", ORDERS)


def tower() -> nn.Sequential:
    return nn.Sequential(*(one for _ in range(4) for one in (nn.Linear(32, 32), nn.GELU())))


def accumulated(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Two backward passes, one after the other."""
    squared(model, batch[:512]).backward()  # type: ignore[no-untyped-call]
    return squared(model, batch[512:])


def workload(loss: Any = squared) -> TrainStep:
    torch.manual_seed(0)
    model = tower().cuda()
    batch = torch.randn(1024, 32, device="cuda")
    return TrainStep(model, loss, torch.optim.SGD(model.parameters(), 1e-2), batch)


def planned(profile: Profile) -> tuple[Step, Technique]:
    """Everything that can be offloaded, and the step."""
    step = on_device(step_of(profile), device_of(profile))
    where = tuple(offload.every(step))
    return step, TECHNIQUE.settled(step, Technique(name=TECHNIQUE.name, where=where))


@pytest.fixture
def movers(monkeypatch: pytest.MonkeyPatch) -> list[StorageMover]:
    """All that are made."""
    made: list[StorageMover] = []
    own = StorageMover.__init__

    def init(self: StorageMover, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(StorageMover, "__init__", init)
    return made


def test_the_slab_is_what_packing_says_and_the_plan_says_so(movers: list[StorageMover]) -> None:
    with emulate():
        profile = torchtrim.record(workload())
    planner = Planner(profile, step_seconds=1.0, fingerprint={}, exclude=("recompute", "replay"))
    plan = planner.floor_plan(Budget(0))
    (technique,) = [one for one in plan.techniques if one.name == TECHNIQUE.name]
    step = on_device(step_of(profile), device_of(profile))
    edits = [edit_of(step, place_of(where)) for where in technique.where]
    blocks = [block for edit in edits if edit for block in host_blocks(edit)]
    buffers = [
        Buffer(number, block.first, block.last, block.bytes, ALIGNMENT)
        for number, block in enumerate(blocks)
    ]
    height = pack(buffers, seconds=0).height
    assert plan.predicted.host_bytes == technique.options["slab_bytes"] == height
    assert plan.predicted.stall_seconds >= 0
    with emulate():
        work = workload()
        TECHNIQUE.apply({"Sequential": work.model}, technique)
        for number in range(3):
            work.step(number)
    assert [mover.stores[False].bytes for mover in movers] == [height]


@EVERY
def test_two_passes_of_a_step_share_the_slab(order: str, movers: list[StorageMover]) -> None:
    def run(technique: Technique | None, order: str) -> tuple[list[torch.Tensor], int]:
        with emulate(streams=order) as emulation:
            work = workload(accumulated)
            if technique is not None:
                TECHNIQUE.apply({"Sequential": work.model}, technique)
            for number in range(3):
                work.step(number)
            assert emulation.orders is None or emulation.orders.races() == []
            left = [one.detach().cpu() for one in work.model.state_dict().values()]
            return left, torch.cuda.max_memory_allocated()

    with emulate():
        step, technique = planned(torchtrim.record(workload(accumulated)))
    plain, peak = run(None, "")
    found, less = run(technique, order)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert less < peak
    edits = [edit for where in technique.where if (edit := edit_of(step, place_of(where)))]
    assert [mover.stores[False].bytes for mover in movers] == [host_peak(edits)]
    sizes = sum(block.bytes for edit in edits for block in host_blocks(edit))
    assert host_peak(edits) <= sizes // 2 + ALIGNMENT


def gradients(order: str, technique: Technique | None) -> tuple[list[torch.Tensor], list[Any]]:
    """Of two calls in streams of their own, of which neither awaits the other."""
    with emulate(streams=order) as emulation:
        work = workload()
        if technique is not None:
            TECHNIQUE.apply({"Sequential": work.model}, technique)
        parameters = list(work.model.parameters())
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        found: list[torch.Tensor] = []
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                loss = squared(work.model, work.batch * (number + 1))
                found += torch.autograd.grad(loss, parameters)
                del loss
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        races = emulation.orders.races() if emulation.orders is not None else []
        return [one.cpu() for one in found], races


def one_by_one() -> Technique:
    """What the last layers leave, all of it fetched when backward begins."""
    with emulate():
        return planned(torchtrim.record(workload()))[1]


@EVERY
def test_calls_in_two_streams_may_use_the_same_bytes(order: str) -> None:
    plain, _ = gradients("", None)
    found, races = gradients(order, one_by_one())
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert races == []


def test_bytes_that_are_written_before_they_were_read_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same where nobody awaits who had the bytes before."""
    plain, _ = gradients("", None)
    technique = one_by_one()
    monkeypatch.setattr(_Store, "_awaited", staticmethod(lambda met: []))
    right, _ = gradients("", technique)
    assert all(torch.equal(a, b) for a, b in zip(plain, right, strict=True))
    _, races = gradients("late", technique)
    assert "stream-write" in {race.row for race in races}


@EVERY
def test_a_graph_that_is_kept_has_memory_of_its_own(order: str, movers: list[StorageMover]) -> None:
    """Two calls are alive at once, and the plan knows of one."""
    technique = one_by_one()

    def run(technique: Technique | None) -> list[torch.Tensor]:
        with emulate(streams=order):
            work = workload()
            if technique is not None:
                TECHNIQUE.apply({"Sequential": work.model}, technique)
            losses = [squared(work.model, work.batch * scale) for scale in (1, 2)]
            for loss in reversed(losses):
                loss.backward()  # type: ignore[no-untyped-call]
            return [one.grad.cpu() for one in work.model.parameters() if one.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(None), run(technique), strict=True))
    (mover,) = movers
    assert mover.stores[False].bytes > technique.options["slab_bytes"]  # type: ignore[operator]


def test_offsets_are_read_as_they_are_written() -> None:
    text = "Net:gelu.3 until addmm.9 from addmm.12 in file at 0,65536"
    place, room = placed(text)
    assert str(place) == "Net:gelu.3 until addmm.9 from addmm.12"
    assert room == ((0, 65536), True)
    assert written(place, room) == text
    with pytest.raises(ApplyFailed, match="cannot read"):
        placed("Net:gelu.3 until addmm.9 from addmm.12 at x")


def test_a_plan_of_before_there_were_slabs_still_runs(movers: list[StorageMover]) -> None:
    where = tuple(str(place_of(one)) for one in one_by_one().where)
    plain, _ = gradients("", None)
    found, _ = gradients("late", Technique(name=TECHNIQUE.name, where=where))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert movers[-1].stores[False].bytes > 0
