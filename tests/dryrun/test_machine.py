"""What is measured on a machine: remembered, and right on each kind of processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, schedule

from torchtrim.dryrun import run, workspace
from torchtrim.dryrun.run import dry_run
from torchtrim.dryrun.workspace import Machine

HERE = Path(__file__)
DILATION = 12
"""Far outside maps of 32 columns: matrix products on some processors, blocks on others."""


def never() -> int:
    raise AssertionError("tried again")


def test_it_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "workspaces.json"
    first = Machine("here", path)
    assert first.once("call", lambda: 500) == 500
    first.save()
    assert Machine("here", path).once("call", never) == 500
    other = Machine("here", path)
    assert other.once("blocks", lambda: 70) == 70
    first.once("another", lambda: 7)
    first.save()
    other.save()
    both = Machine("here", path)
    assert (both.once("blocks", lambda: 0), both.once("another", lambda: 0)) == (70, 7)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff",
        b"[" * 5000,
        b'{"machine": "here", "calls": {"call": -1}}',
        b'{"machine": "here", "calls": {"call": "1"}}',
        b'{"machine": "here", "calls": {"call": 1e99}}',
        b'{"machine": "another", "calls": {"call": 1}}',
        b'{"machine": "here"}',
    ],
)
def test_a_broken_file_is_as_none_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "workspaces.json"
    path.write_bytes(content)
    machine = Machine("here", path)
    assert machine.once("call", lambda: 10) == 10
    machine.save()
    assert json.loads(path.read_bytes()) == {"machine": "here", "calls": {"call": 10}}


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    machine = Machine("here", tmp_path / "file" / "workspaces.json")
    assert machine.once("call", lambda: 10) == 10
    machine.save()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_name_of_a_machine_tells_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for instructions in ("SSE41", "AVX2", ""):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", instructions)
        names.add(workspace._name())
    assert len(names) == 3
    assert all(name.startswith(torch.__version__) for name in names)


def convolutions() -> None:
    """Told and measured bytes on the instructions that this process may use."""
    from dryrun import test_workspace as workspaces

    torch.set_num_threads(1)
    torch.manual_seed(0)
    for inner, outer, stride in ((3, 24, 2), (16, 8, 1), (24, 32, 2)):
        workspaces.test_convolutions_of_few_channels(inner, outer, stride)
    for side, dilation in ((32, DILATION), (8, 4)):
        workspaces.test_dilated_convolutions_on_small_maps(side, dilation)
    workspaces.test_transposed_convolutions(16, 8, 3, 2)


@pytest.mark.parametrize(
    "instructions",
    [
        "SSE41",
        pytest.param("AVX2", marks=pytest.mark.slow),
        pytest.param("AVX512_CORE", marks=pytest.mark.slow),
        pytest.param("AVX512_CORE_AMX", marks=pytest.mark.slow),
    ],
)
def test_with_fewer_instructions(instructions: str, tmp_path: Path) -> None:
    """oneDNN is held to some instructions; a processor that has fewer uses those that it has."""
    code = "from dryrun.test_machine import convolutions; convolutions()"
    paths = (str(HERE.parents[1]), os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": instructions,
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


def test_the_programs_own_profiler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("here", None)
    for module in (workspace, run):
        monkeypatch.setattr(module, "machine", lambda: machine)
    x, layer = torch.randn(5, 16, 32, 32), torch.nn.Conv2d(16, 8, 3)
    with dry_run(".", owned_only=True) as alone:
        layer(x)
    assert not any("scratch" in note for note in alone.guesses.notes())
    plan = schedule(wait=0, warmup=1, active=1)
    with dry_run(".", owned_only=True) as profiled, profile(schedule=plan) as theirs:
        torch.nn.Conv2d(16, 9, 3)(x)
        theirs.step()
        torch.nn.Conv2d(16, 10, 3)(x)
    assert any("is not counted" in note for note in profiled.guesses.notes())
