"""What is measured on a machine: remembered, grown to more samples, and right on each kind of processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, schedule

from torchtrim.dryrun import convolution
from torchtrim.dryrun import machine as machines
from torchtrim.dryrun.machine import Call, Machine
from torchtrim.dryrun.run import dry_run

aten = torch.ops.aten
HERE = Path(__file__)
DILATION = 12
"""Far outside maps of 32 columns: matrix products on some processors, blocks on others."""


def call(attempt: Callable[[int], int], **given: Any) -> Call:
    known = {"name": "call", "formula": lambda samples: 100_000 * samples, "touched": 1000}
    return Call(**{**known, "attempt": attempt, "most": 4, **given})


def never(samples: int) -> int:
    raise AssertionError(f"tried with {samples} samples")


def test_a_formula_that_holds_is_used_and_one_that_does_not_is_not() -> None:
    assert Machine("one", None).needs(call(lambda samples: 100_000 * samples), 50) == 5_000_000
    assert Machine("other", None).needs(call(lambda samples: 7000 + 300 * samples), 50) == 22_000
    assert Machine("other", None).needs(call(lambda samples: 7000 + 300 * samples), 3) == 7900
    assert Machine("other", None).needs(call(lambda samples: 7000 * samples), 1) == 7000


def test_where_bytes_do_not_grow_yet_the_formula_is_a_bound() -> None:
    assert Machine("here", None).needs(call(lambda samples: 900_000), 4) == 900_000
    assert Machine("here", None).needs(call(lambda samples: 900_000), 8) == 900_000
    assert Machine("here", None).needs(call(lambda samples: 900_000), 50) == 5_000_000


def test_a_call_is_tried_with_no_more_samples_than_take_no_time() -> None:
    tried: list[int] = []

    def attempt(samples: int) -> int:
        tried.append(samples)
        return 50 * samples

    machine = Machine("here", None)
    assert machine.needs(call(attempt), 3) == 150
    assert machine.needs(call(attempt), 1000) == 50_000
    assert machine.needs(call(attempt), 999) == 49_950
    assert tried == [3, 4, 2]
    assert not machine.take_untried()
    assert machine.needs(call(never, name="large", most=0, few=2), 1000) == 100_000_000
    assert machine.take_untried()
    assert not machine.take_untried()


def test_it_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "workspaces.json"
    first = Machine("here", path)
    assert first.needs(call(lambda samples: 5 * samples), 100) == 500
    first.save()
    assert Machine("here", path).needs(call(never), 100) == 500
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
        b'{"machine": "here", "calls": {"call x 2": -1}}',
        b'{"machine": "here", "calls": {"call x 2": "1"}}',
        b'{"machine": "here", "calls": {"call x 2": 1e99}}',
        b'{"machine": "another", "calls": {"call x 2": 1}}',
        b'{"machine": "here"}',
    ],
)
def test_a_broken_file_is_as_none_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "workspaces.json"
    path.write_bytes(content)
    machine = Machine("here", path)
    assert machine.needs(call(lambda samples: 5 * samples), 2) == 10
    machine.save()
    assert json.loads(path.read_bytes()) == {"machine": "here", "calls": {"call x 2": 10}}


def test_where_nothing_can_be_written_nothing_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    machine = Machine("here", tmp_path / "file" / "workspaces.json")
    assert machine.needs(call(lambda samples: 5 * samples), 2) == 10
    machine.save()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def dilated(samples: int) -> int:
    """Bytes that the gradients of a dilated convolution are said to need."""
    x, w = torch.empty(samples, 64, 32, 32), torch.empty(32, 64, 3, 3)
    gradient = torch.empty(samples, 32, 32, 32)
    apart = [DILATION] * 2
    args = (gradient, x, w, None, [1, 1], apart, apart, False, [0, 0], 1, [True, True, False])
    return convolution.backward(aten.convolution_backward.default, args, {}, None)


@pytest.mark.parametrize(
    ("instructions", "measured", "told"),
    [
        ("AVX512", lambda n: max(2_285_568, 393_216 * n), {2: 2_285_568, 40: 15_728_640}),
        ("AVX512", lambda n: 393_216 * n, {2: 786_432, 3: 1_179_648, 40: 15_728_640}),
        ("AVX2", lambda n: max(2_654_464, 260_096 * n), {2: 2_654_464, 8: 2_654_464}),
    ],
    ids=["AMD with AVX-512", "Intel with AMX", "AMD with AVX2"],
)
def test_the_same_convolution_elsewhere(
    instructions: str,
    measured: Callable[[int], int],
    told: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What three processors were seen to take."""
    machine = Machine("elsewhere", None)
    monkeypatch.setattr(convolution, "machine", lambda: machine)
    monkeypatch.setattr(convolution, "needed", lambda call: measured(len(call()[0])))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    assert {samples: dilated(samples) for samples in told} == told


def test_the_name_of_a_machine_tells_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for instructions in ("SSE41", "AVX2", ""):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", instructions)
        names.add(machines._name())
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
    for module in (convolution, machines):
        monkeypatch.setattr(module, "machine", lambda: machine)
    monkeypatch.setattr("torchtrim.dryrun.run.machine", lambda: machine)
    monkeypatch.setattr("torchtrim.dryrun.mode.machine", lambda: machine)
    x, layer = torch.randn(5, 16, 32, 32), torch.nn.Conv2d(16, 8, 3)
    with dry_run(".", owned_only=True) as alone:
        layer(x)
    assert not any("scratch" in note for note in alone.guesses.notes())
    plan = schedule(wait=0, warmup=1, active=1)
    with dry_run(".", owned_only=True) as profiled, profile(schedule=plan) as theirs:
        torch.nn.Conv2d(16, 9, 3)(x)
        theirs.step()
        torch.nn.Conv2d(16, 10, 3)(x)
    assert any("scratch is counted" in note for note in profiled.guesses.notes())
