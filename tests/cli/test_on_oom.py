"""`torchtrim run --on-oom`: what it writes and says when a GPU's memory runs out."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from snapshots import MIB, Writer
from torchtrim.cli.main import torchtrim
from torchtrim.memory.caching import DeviceFull

SCRIPT = """
import torch
print("began")
FULL()
"""


def run(folder: Path, *options: str) -> Result:
    words = ["run", "--on-oom", str(folder / "oom.pickle"), *options, str(folder / "job.py")]
    return CliRunner().invoke(torchtrim, words, standalone_mode=False)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 64 MiB whose allocator tells its observer and raises."""
    observers: list[Callable[..., None]] = []
    writer = Writer(capacity=64 * MIB)

    def fill() -> None:
        try:
            for _ in range(3):
                writer.malloc(30 * MIB)
        except DeviceFull as error:
            event = {"action": "oom", "size": error.size, "stream": 0, "device_free": 4 * MIB}
            writer.events.append(event)
            for observer in observers:
                observer(0, error.size, 64 * MIB, 4 * MIB)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30 MiB.") from None

    def dump(path: str) -> None:
        Path(path).write_bytes(pickle.dumps(writer.dumped()))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    attach = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, attach, observers.append, raising=False)
    monkeypatch.setattr(torch, "_fill_for_this_test", fill, raising=False)


def test_the_story_of_a_job_that_died(tmp_path: Path, full: None) -> None:
    (tmp_path / "job.py").write_text(SCRIPT.replace("FULL", "torch._fill_for_this_test"))
    result = run(tmp_path)
    assert isinstance(result.exception, SystemExit)
    assert result.exception.code == 1
    assert (tmp_path / "oom.pickle").is_file()
    assert "began" in result.stdout
    assert "memory ran out; the snapshot is" in result.stderr
    assert "60.0 MiB" in result.stderr


def test_a_job_that_ends_well_writes_nothing(tmp_path: Path, full: None) -> None:
    (tmp_path / "job.py").write_text("print('well')\n")
    result = run(tmp_path)
    assert not (tmp_path / "oom.pickle").exists()
    assert "memory ran out" not in result.stderr


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('well')\n")
    result = run(tmp_path)
    assert "found no GPU" in result.stderr
    assert "well" in result.stdout
