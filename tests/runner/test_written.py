"""Each run of a script finds its folders as the first one found them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torchtrim import Script
from torchtrim.records.trial import Request
from torchtrim.runner.trials import run_trial

_SCRIPT = """
import os, shutil, subprocess, sys, threading
from pathlib import Path
import torch
from torch import nn

with open("cache.txt", "a") as cache:
    cache.write("counted ")
if "strict" in sys.argv:
    subprocess.run(["true"])  # which may be a download
    os.makedirs("runs/one")
torch.manual_seed(0)
net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), 0.1)
first = 0
if os.path.exists("last.pt"):
    first = torch.load("last.pt")["step"]
for step in range(first, first + 6):
    opt.zero_grad()
    net(torch.ones(2, 4)).sum().backward()
    opt.step()
    print(step)
    torch.save({"step": step + 1}, "last.tmp")
    os.replace("last.tmp", "last.pt")
    os.makedirs(f"steps/{step}", exist_ok=True)
    torch.save({}, f"steps/{step}/é.pt")
    with open("log.csv", "a") as log:
        log.write("a line\\n")
    Path("best.txt").write_text("worse")
    Path("old.txt").unlink(missing_ok=True)
    shutil.rmtree("results", ignore_errors=True)
    os.makedirs("results", exist_ok=True)
    os.symlink("best.txt", f"link{step}")
    threading.Thread(target=Path("thread.txt").write_text, args=("t",)).start()
    Path(".hidden").write_text("stays")
"""


def found_in(folder: Path) -> dict[str, str]:
    """The files and folders, with what they hold."""
    return {
        str(path.relative_to(folder)): "" if path.is_dir() else path.read_text()
        for path in sorted(folder.rglob("*"))
    }


def test_what_steps_write_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "results" / "deep").mkdir(parents=True)
    (home / "results" / "deep" / "figures").write_text("1 2 3")
    (home / "best.txt").write_text("best of a long training")
    (home / "old.txt").write_text("old")
    (home / "train.py").write_text(_SCRIPT)
    monkeypatch.chdir(home)
    before = found_in(home)
    script = Script("train.py", device="cpu", timeout=120)
    losses = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        losses.append(run_trial(script, Request(steps=3), folder).steps)
    assert len(losses[0]) == len(losses[1])
    assert found_in(home) == {**before, ".hidden": "stays"}


def test_what_stops_a_later_run_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "train.py").write_text(_SCRIPT)
    monkeypatch.chdir(home)
    script = Script("train.py", ("strict",), device="cpu", timeout=120)
    for number, kept in enumerate((True, False, False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert run_trial(script, Request(steps=1), folder).steps
        assert (home / "runs").exists() == kept


_OF_OTHERS = """
import os
import torch
from torch import nn

net = nn.Linear(4, 4)
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(6):
    net(torch.ones(2, 4)).sum().backward()
    opt.step()
    with open("log.csv", "a") as log:
        log.write(f"step {step}\\n")
    if step == 0:
        os.rename("results", "results_old")
        os.makedirs("shared")
        os.mkfifo("shared/of-another-program")  # as another would: no event tells of it
        os.replace("large.pt", "previous.pt")
        os.makedirs("tmp-checkpoint/deep")
        torch.save({}, "tmp-checkpoint/deep/one.pt")
        os.rename("tmp-checkpoint", "checkpoint")
"""


def test_files_of_others_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed folder, a folder in use, a log that grows, and a file that is too large for a copy."""
    home, folder = tmp_path / "home", tmp_path / "run"
    (home / "results").mkdir(parents=True)
    folder.mkdir()
    (home / "results" / "figures").write_text("1 2 3")
    (home / "log.csv").write_text("of a long training\n")
    size = shutil.disk_usage(folder).free // 2
    with (home / "large.pt").open("wb") as large:
        large.truncate(size)  # without blocks on the disk
    (home / "train.py").write_text(_OF_OTHERS)
    monkeypatch.chdir(home)
    run_trial(Script("train.py", device="cpu", timeout=120), Request(steps=3), folder)
    assert (home / "results_old" / "figures").read_text() == "1 2 3"
    assert (home / "log.csv").read_text().startswith("of a long training\n")
    assert (home / "previous.pt").stat().st_size == size
    assert (home / "shared" / "of-another-program").exists()
    assert not (home / "checkpoint").exists()
