"""Real ranks: what each leaves, how they fail, and that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import draws
from torchtrim.emulator.device import current
from torchtrim.errors import ScriptFailed, TorchtrimError
from torchtrim.records.profile import is_emulated
from torchtrim.records.report import Report
from torchtrim.records.trial import Request, Trial
from torchtrim.runner import ranks
from torchtrim.runner.joining import Joining
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import run_trial
from torchtrim.workflows.findings import report_of

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "ranks.py")
REQUEST = Request(steps=1, warmup=0)
LIMIT = 300.0


def script(*words: str, timeout: float = LIMIT) -> Script:
    return Script(SCRIPT, words, processes=2, timeout=timeout)


@cache
def trial(*words: str) -> Trial:
    with working_folder() as folder:
        return run_trial(script(*words), REQUEST, folder)


def report(*words: str) -> Report:
    return report_of("diagnose", script(*words), trial(*words))


WASTES = ("--find-unused", "--accumulate", "2", "--keeps", "1")
NEAT = ("--accumulate", "2", "--no-sync", "--backend", "nccl", "--cuda")
DETERMINED = {"TT603", "TT604", "TT605"}


def test_a_profile_of_each_rank() -> None:
    found = trial(*WASTES)
    profiles = [one.profile for one in found.ranks]
    assert [(p.rank, p.world) for p in profiles if p is not None] == [(0, 2), (1, 2)]
    assert found.peak_bytes == max(one.peak_bytes for one in found.ranks)
    assert found.ranks[1].peak_bytes - found.ranks[0].peak_bytes >= 2**21


def test_collectives_have_bytes_a_group_and_a_duration() -> None:
    for one in trial(*WASTES).ranks:
        assert one.profile is not None
        (replica,) = one.profile.replicas
        assert replica.find_unused
        assert replica.unused_bytes == 0
        reduces = [
            c
            for c in one.profile.collectives
            if one.profile.operators[c.operator].phase == "backward" and c.name == "allreduce"
        ]
        assert sum(c.bytes for c in reduces) >= 2 * replica.gradient_bytes
        assert {(c.group, c.ranks) for c in reduces} == {(reduces[0].group, 2)}
        assert all(c.seconds is not None for c in reduces)


def test_what_is_wrong_across_the_ranks_is_found() -> None:
    found = report(*WASTES)
    assert {one.code for one in found.findings} >= DETERMINED
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert found.exchanges
    assert all(len(row.ranks) == 2 for row in found.exchanges)


def test_a_neat_script_that_insists_on_nccl_runs_on_emulated_devices() -> None:
    found = report(*NEAT)
    assert is_emulated(found.device)
    assert not DETERMINED & {one.code for one in found.findings}
    assert any("gloo" in note for note in found.notes)
    assert any("cuda:0" in note for note in found.notes)


def test_the_mesh_that_fully_shard_makes_by_itself_is_of_the_emulated_device() -> None:
    meshed = Script(SCRIPT.replace("ranks.py", "default_mesh.py"), (), processes=2, timeout=LIMIT)
    with working_folder() as folder:
        found = run_trial(meshed, REQUEST, folder)
    assert is_emulated(found.device)
    for one in found.ranks:
        assert one.profile is not None
        gathered = [life for life in one.profile.storages if life.kind == "gathered"]
        assert gathered
        assert {life.device for life in gathered} == {"cuda:0"}


def test_a_search_that_finds_something_is_told_of_nothing() -> None:
    words = ("--find-unused", "--leave-spare")
    (replica,) = trial(*words).profile.replicas  # type: ignore[union-attr]
    assert replica.unused_bytes > 0
    assert "TT603" not in {one.code for one in report(*words).findings}


@pytest.mark.parametrize("how", ["spawn", pytest.param("start", marks=pytest.mark.slow), "launch"])
def test_a_script_that_spawns_its_ranks(how: str) -> None:
    spawns = Script(SCRIPT.replace("ranks.py", "spawns.py"), (how,), processes=2, timeout=LIMIT)
    with working_folder() as folder:
        found = run_trial(spawns, REQUEST, folder)
    assert [one.profile.world for one in found.ranks if one.profile is not None] == [2, 2]
    assert any("would spawn" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "code"), [("--slow-rank", "TT601"), ("--slow-loader", "TT606")])
def test_a_rank_that_is_late(option: str, code: str) -> None:
    found = report(option, "1", "--seconds", "3")
    late = [one for one in found.findings if one.code in ("TT601", "TT606")]
    assert [one.code for one in late] == [code]
    assert "rank 1" in late[0].message


def test_a_rank_that_raises_is_named_with_what_became_of_the_other() -> None:
    with working_folder() as folder, pytest.raises(ScriptFailed) as failed:
        run_trial(script("--raises", "1", "--at", "1"), REQUEST, folder)
    assert str(failed.value).startswith("rank 1 of 2: the script failed: ValueError: this rank has")
    assert "rank 0" in failed.value.learnt
    assert "this rank has no more data" in failed.value.traceback
    assert failed.value.exit_code == 3


def test_a_rank_that_dies_is_named() -> None:
    with working_folder() as folder, pytest.raises(ScriptFailed) as failed:
        run_trial(script("--dies", "0", "--at", "1"), REQUEST, folder)
    assert "rank 0 of 2: the script's process died with SIGKILL" in str(failed.value)
    assert "rank 1" in failed.value.learnt


@pytest.mark.slow
def test_a_rank_that_stalls_ends_with_where_each_is(tmp_path: Path) -> None:
    words = ("--stalls", "1", "--at", "0")
    with working_folder() as folder, pytest.raises(ScriptFailed) as failed:
        run_trial(script(*words, timeout=6.0), REQUEST, folder)
    assert "was stopped after 6 s" in str(failed.value)
    assert "rank 0" in f"{failed.value} {failed.value.learnt}"
    assert "rank 1" in f"{failed.value} {failed.value.learnt}"


def test_a_script_for_ranks_that_runs_alone_is_told_how() -> None:
    with working_folder() as folder, pytest.raises(ScriptFailed, match="--processes 2"):
        run_trial(script()._replace(processes=1), REQUEST, folder)


class Started:
    """The processes of the ranks that were started meanwhile, and a kill of one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: float, victim: int) -> None:
        self.pids: list[int] = []
        self._original = ranks.start
        self._over = threading.Event()
        monkeypatch.setattr(ranks, "start", self._note)
        self._thread = threading.Thread(target=self._kill, args=(seconds, victim))

    def _note(self, *args: Any) -> Any:
        process = self._original(*args)
        self.pids.append(process.pid)
        if len(self.pids) == 2:
            self._thread.start()
        return process

    def _kill(self, seconds: float, victim: int) -> None:
        self._over.wait(seconds)
        pid = self.pids[victim]
        if not self._over.is_set() and pid in sessions_left([pid]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """No kill any more."""
        self._over.set()
        self._thread.join()


def sessions_left(pids: list[int]) -> list[int]:
    """The processes that are of these processes' sessions, zombies left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in pids and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def all_gone(pids: list[int]) -> bool:
    """Whether they are gone, within a time that no machine needs."""
    for _ in range(1200):
        if not sessions_left(pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_kills_at_random_moments_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(draws.seed())
    for _ in range(30 if draws.is_full() else 3):
        seconds, victim = drawn.uniform(0.0, 3.0), drawn.randrange(2)
        started = Started(monkeypatch, seconds=seconds, victim=victim)
        with working_folder() as folder, contextlib.suppress(TorchtrimError):
            run_trial(script(), Request(steps=80), folder)
        started.end()
        monkeypatch.undo()
        assert all_gone(started.pids), (seconds, victim)


_PARENT = """
import sys
from pathlib import Path
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script
from torchtrim.runner.trials import run_trial
words = ("--pids", sys.argv[2], "--stalls", "1", "--at", "0")
run_trial(Script(sys.argv[1], words, processes=2), Request(), Path(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_the_ranks_of_a_parent_that_is_killed_are_gone(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, SCRIPT, str(tmp_path)])
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        for _ in range(1200):
            if all(file.exists() and file.read_text() for file in files):
                break
            time.sleep(0.1)
        pids = [int(file.read_text()) for file in files]
    finally:
        parent.kill()
        parent.wait()
    assert all_gone(pids)


@pytest.mark.parametrize(
    ("gpus", "asked", "served"),
    [(0, "nccl", "gloo"), (1, "nccl", "gloo"), (2, "nccl", "nccl"), (0, "gloo", "gloo")],
)
def test_nccl_needs_a_real_gpu_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, asked: str, served: str
) -> None:
    """Also where torch is built for CUDA, and to be asked begins no emulation."""
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: gpus, raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert Joining(2)._served(asked, {}) == served
    assert current() is None


_ALONE = """
import sys

import torch
import torch.distributed
import torch.multiprocessing
from torch import nn


def work(rank, world, store):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", store, rank=rank, world_size=world)
    torch.distributed.barrier(device_ids=[rank])
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda(rank)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 8, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
    print(loss.item())


if __name__ == "__main__":
    worlds = torch.cuda.device_count()
    torch.multiprocessing.spawn(work, nprocs=worlds, args=(worlds, f"file://{sys.argv[1]}"))
"""


def test_a_rank_alone_needs_neither_nccl_nor_a_process_of_its_own(tmp_path: Path) -> None:
    """As a script that spawns a rank for each device does where one is emulated."""
    file = tmp_path / "alone.py"
    file.write_text(_ALONE)
    one = Script(str(file), (str(tmp_path / "store"),), timeout=LIMIT)
    with working_folder() as folder:
        found = run_trial(one, Request(steps=1, warmup=0, device="emulated"), folder)
    assert found.steps
    assert found.profile is not None
    assert found.profile.storages
    assert sum("gloo" in note or "would spawn in one" in note for note in found.notes) == 2


def test_a_rank_alone_on_the_host_has_the_backend_that_it_asks_for() -> None:
    assert Joining(1)._served("nccl", {}) == "nccl"
