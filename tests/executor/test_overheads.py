"""What running again takes besides is measured once on a machine, kept, and planned with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.test_planner import profile_of
from torchtrim.executor import overheads
from torchtrim.records.profile import Overheads
from torchtrim.step.from_profile import step_of
from torchtrim.step.rerun import rerun
from torchtrim.step.step import Span

NONE = Overheads(part=0.0, operator=0.0, tensor=0.0, watched=0.0)
DEAR = Overheads(part=1.0, operator=0.25, tensor=0.5, watched=0.125)


class Counting(TorchDispatchMode):
    """Counts the operators it sees."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(overheads, "_ROUNDS", 6)
    return overheads._path()


def test_they_are_measured_once_and_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    first = next(filter(None, (overheads.overheads() for _ in range(5))), None)
    assert first is not None
    assert kept.exists()
    assert all(0.0 <= one < 0.1 for one in msgspec.structs.astuple(first))
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(overheads, "measured", lambda: pytest.fail("measured again"))
    assert overheads.overheads() == first


def test_a_broken_file_is_measured_anew(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.parent.mkdir(parents=True)
    kept.write_text("{")
    monkeypatch.setattr(overheads, "measured", lambda: DEAR)
    assert overheads.overheads() == DEAR
    assert msgspec.json.decode(kept.read_bytes(), type=Overheads) == DEAR


def test_without_a_measurement_nothing_is_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another load can make the differences negative."""
    monkeypatch.setattr(overheads, "measured", lambda: None)
    assert overheads.overheads() is None
    assert not kept.exists()


def test_a_step_takes_them_from_its_profile() -> None:
    """A part of three operators, none of which takes any time itself."""
    profile = profile_of("blocks")
    dear = step_of(msgspec.structs.replace(profile, overheads=DEAR))
    free = step_of(msgspec.structs.replace(profile, overheads=NONE))
    call = next(one for one in profile.calls if profile.modules[one.module].path.endswith("0"))
    edits = [rerun(step, [Span(call.first, call.last)]) for step in (dear, free)]
    assert all(edits)
    assert edits[0].seconds - edits[1].seconds >= DEAR.part + DEAR.operator
    assert (dear.overhead.recipe, dear.overhead.watched) == (DEAR.tensor, DEAR.watched)
    assert dear.overhead.random_state == step_of(profile).overhead.random_state


def test_neither_modes_nor_defaults_of_the_caller_matter(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured runs on the CPU, with gradients, and no mode of the caller sees it."""
    own, threads, results = overheads._seconds, torch.get_num_threads(), []

    def seconds(model: nn.Module) -> float:
        results.append(model(torch.ones(2, 2, requires_grad=True)))
        return own(model)

    monkeypatch.setattr(overheads, "_seconds", seconds)
    with Counting() as seen, torch.inference_mode(), torch.device("meta"):
        overheads.overheads()
    assert (torch.get_num_threads(), seen.operators) == (threads, 0)
    assert results
    assert all(one.is_cpu and one.requires_grad for one in results)


def test_what_makes_no_sense_is_not_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "_of_tensors", lambda: (0.0, 0.0))
    assert overheads.overheads() is None
    assert not kept.exists()


def test_a_user_without_a_home_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(overheads, "_ROUNDS", 2)
    monkeypatch.setattr(overheads, "folder", homeless)
    assert isinstance(overheads.overheads(), Overheads | None)
