"""Offload to memory-mapped files: every bit agrees, on a CPU too, and nothing is left of them."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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
from torchtrim.executor import mapped_files as scratch
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.edits import FILE
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Step
from torchtrim.techniques.offload_activations.technique import TECHNIQUE
from torchtrim.techniques.offload_optimizer.technique import TECHNIQUE as OF_OPTIMIZER

ORDERS = draws.orders(10)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files are for a moment; at the end there is none."""
    monkeypatch.setenv(scratch.FOLDER, str(tmp_path / "files"))
    yield tmp_path / "files"
    assert not list((tmp_path / "files").glob("*"))


def workload(device: str) -> TrainStep:
    torch.manual_seed(0)
    inner = [part for _ in range(5) for part in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(*inner).to(device)
    batch = torch.randn(1024, 32, device=device)
    return TrainStep(model, squared, torch.optim.AdamW(model.parameters(), 1e-2), batch)


def priced(profile: Profile) -> Step:
    step = step_of(profile)
    return step if profile.device.startswith("cpu") else on_device(step, device_of(profile))


def filed(step: Step) -> tuple[Technique, int]:
    """All that can go to a file, and the predicted peak."""
    found = offload.every(step, TECHNIQUE.to_files(step))
    technique = Technique(name=TECHNIQUE.name, where=tuple(found))
    return TECHNIQUE.settled(step, technique), simulate(step, found.values()).peak_bytes


def run(device: str, technique: Technique | None) -> tuple[list[bytes], Profile]:
    """What some steps leave, as bytes, since tensors of the host would count, and the profile of one."""
    work = workload(device)
    if technique is not None:
        TECHNIQUE.apply({"Sequential": work.model}, technique)
    for number in range(2):
        work.step(number)
    gc.collect()
    profile = torchtrim.record(work)
    values = work.model.state_dict().values()
    return [one.detach().cpu().numpy().tobytes() for one in values], profile


def is_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_on_a_cpu_every_bit_agrees_and_the_peak_is_the_planned_one() -> None:
    plain, profile = run("cpu", None)
    technique, predicted = filed(step_of(profile))
    assert technique.where
    assert "slab_bytes" not in technique.options
    found, planned = run("cpu", technique)
    assert plain == found
    assert predicted < profile.peak_bytes
    assert planned.peak_bytes == pytest.approx(predicted, rel=0.01)
    assert FILE in {one.pool for one in planned.storages}


def test_where_hooks_of_others_take_the_saving_it_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = workload("cpu")
    technique, _ = filed(step_of(torchtrim.record(work)))
    handle = TECHNIQUE.apply({"Sequential": work.model}, technique)
    work.step(0)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            work.step(0)
    said = capsys.readouterr().err
    assert said.count("torchtrim: ") == 1
    assert "offload_activations saves nothing there" in said
    handle.revert()


class Exponential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made = x.exp()
        return self.made


@pytest.mark.parametrize("moved", ["exp.0", "addmm.0"])
def test_a_saved_tensor_that_is_written_to_fails_in_backward_as_without_a_plan(moved: str) -> None:
    grows = Exponential()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), grows, nn.Linear(8, 8))
    where = (f"Sequential:{moved} until end from addmm.1 in file",)
    TECHNIQUE.apply({"Sequential": model}, Technique(name=TECHNIQUE.name, where=where))
    model(torch.randn(8, 8)).sum().backward()
    loss = model(torch.randn(8, 8)).sum()
    grows.made.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[8, 8\]"):
        loss.backward()


@pytest.mark.parametrize("order", ORDERS)
def test_on_a_device_every_bit_agrees(order: str) -> None:
    with emulate():
        plain, profile = run("cuda", None)
    technique, predicted = filed(priced(profile))
    with emulate(streams=order) as emulation:
        found, planned = run("cuda", technique)
        assert emulation.orders is not None
        assert emulation.orders.races() == []
    assert plain == found
    assert planned.peak_bytes == pytest.approx(predicted, rel=0.01)


def names(profile: Profile, host: int | None, *exclude: str) -> dict[str, Any]:
    """The techniques of the lowest plan."""
    planner = Planner(profile, step_seconds=1.0, fingerprint={}, host_bytes=host, exclude=exclude)
    plan = planner.floor_plan(Budget(0))
    return {one.name: one for one in plan.techniques if one.name.startswith("offload_")}


def test_a_file_is_planned_where_the_host_is_the_limit() -> None:
    others = ("recompute", "replay", "optimizer_in_backward")
    with emulate():
        profile = torchtrim.record(workload("cuda"))
    free = names(profile, None, *others)
    assert "file_bytes" not in free[TECHNIQUE.name].options
    none = names(profile, 0, *others)
    assert "slab_bytes" not in none[TECHNIQUE.name].options
    assert none[TECHNIQUE.name].options["file_bytes"]
    if OF_OPTIMIZER.name in none:
        assert none[OF_OPTIMIZER.name].options["file"] is True


def test_on_a_cpu_it_is_planned_where_the_host_has_a_budget_and_to_a_file_alone() -> None:
    profile = torchtrim.record(workload("cpu"))
    others = ("recompute", "replay", "optimizer_in_backward")
    assert names(profile, None, *others) == {}
    found = names(profile, 2**30, *others)
    assert found[TECHNIQUE.name].options["file_bytes"]
    assert all(" in file" in where for where in found[TECHNIQUE.name].where)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_optimizers_state_is_in_a_file_and_equal(kind: str, device: str) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}

    def train(in_file: bool) -> list[torch.Tensor]:
        with emulate(streams="late"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device)
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, **options)
            if in_file:
                how: Any = {"chunk_bytes": 9000, "file": True}
                where = Technique(name=OF_OPTIMIZER.name, where=("O",), options=how)
                handle = OF_OPTIMIZER.apply({"O": optimizer}, where)
            for number in range(6):
                squared(model, torch.randn(8, 64, device=device)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if number == 2:
                    optimizer.load_state_dict(optimizer.state_dict())
                if number == 4 and in_file:
                    states = [v for one in optimizer.state.values() for v in one.values()]
                    large = [v for v in states if isinstance(v, torch.Tensor) and v.numel() > 1]
                    assert large
                    assert all(one.untyped_storage().filename for one in large)
                    handle.revert()
                    assert not any(
                        v.untyped_storage().filename
                        for one in optimizer.state.values()
                        for v in one.values()
                        if isinstance(v, torch.Tensor)
                    )
            states = [v for one in optimizer.state.values() for v in one.values()]
            every = [*model.parameters(), *(v for v in states if isinstance(v, torch.Tensor))]
            return [one.detach().cpu() for one in every]

    assert is_equal(train(in_file=False), train(in_file=True))


KILLED = """
import os, signal, sys
from torchtrim.executor import mapped_files as scratch

def killed(*_): os.kill(os.getpid(), signal.SIGKILL)

setattr(scratch, sys.argv[1], killed)
scratch.mapped(4096)
"""


@pytest.mark.slow
def test_what_a_killed_process_leaves_is_removed_by_the_next(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, "_reserve"], check=False, timeout=300)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(folder.glob("*"))) == 1
    memory = scratch.mapped(4096)
    assert list(folder.glob("*")) == []
    memory.fill_(7)
    assert int(memory.sum()) == 7 * 4096


def test_a_file_that_is_in_use_is_not_removed(folder: Path) -> None:
    folder.mkdir()
    path = folder / "1-x.scratch"
    number = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        scratch._lock(number)
        scratch.tidy(folder)
        assert path.exists()
    finally:
        os.close(number)
    scratch.tidy(folder)
    assert not path.exists()


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch, "_reserve", full)
    with pytest.raises(ApplyFailed, match=r"No space left on device.*TORCHTRIM_SCRATCH"):
        scratch.mapped(4096)
