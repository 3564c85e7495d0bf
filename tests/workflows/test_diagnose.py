"""Files and folders -> one report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recordings import training
from torchtrim.api import Request, Script, diagnose_report
from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.workflows.trace import diagnose_traces


def test_one_file_and_several_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        made = training(rank + 1)
        made.rank = rank
        made.write(tmp_path / f"rank{rank}.pt.trace.json.gz")
    one = diagnose_traces([tmp_path / "rank0.pt.trace.json.gz"])
    assert (one.rank, one.ranks) == (0, ())
    told: list[str] = []
    both = diagnose_traces([tmp_path], progress=told.append)
    assert [rank.rank for rank in both.ranks] == [0, 1]
    assert both.rank == 1
    assert len(told) == 2


def test_what_is_unreadable_in_a_folder_is_said(tmp_path: Path) -> None:
    training(1).write(tmp_path / "good.json")
    (tmp_path / "settings.json").write_text("{}")
    report = diagnose_traces([tmp_path])
    assert report.sync_calls == 1
    assert any("Left out" in note and "settings.json" in note for note in report.notes)
    with pytest.raises(UnreadableInput, match=r"settings\.json"):
        diagnose_traces([tmp_path / "good.json", tmp_path / "settings.json"])
    (tmp_path / "good.json").unlink()
    with pytest.raises(UnreadableInput, match=r"settings\.json"):
        diagnose_traces([tmp_path])


def test_lines_are_looked_up_in_the_source(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    body = "\n" * 8 + "import torch\ndef step(x):\n    y = x * 2\n    return y.item()\n"
    (source / "train.py").write_text(body)
    path = training(2).write(tmp_path / "t.json")
    without, found = diagnose_traces([path]), diagnose_traces([path], source=source)
    assert (without.sites[0].line, without.sites[0].exact) == (10, False)
    assert (found.sites[0].line, found.sites[0].exact) == (12, True)


def test_it_needs_no_torch() -> None:
    code = "import sys, torchtrim.traces.reader, torchtrim.costs.syncs, torchtrim.report.trace_text"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False"


RACES = """
import sys
import torch
from torch import nn

model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side = torch.cuda.Stream()
for _ in range(8):
    x = torch.ones(8, 16, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if "waits" in sys.argv:
        torch.cuda.current_stream().wait_stream(side)
    loss = model(y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RACING = 1 + RACES.splitlines().index("    loss = model(y).square().mean()")


def test_the_line_that_races(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RACES)
    script = Script(str(path), device="emulated", streams="late")
    racing = diagnose_report(script, Request(steps=1))
    found = [finding for finding in racing.report.findings if finding.code == "TT105"]
    assert [finding.line for finding in found] == [RACING]
    assert "Data that another stream computes or copies is read too early" in found[0].message
    waiting = diagnose_report(script._replace(args=("waits",)), Request(steps=1))
    assert not [finding for finding in waiting.report.findings if finding.code == "TT105"]


@pytest.mark.parametrize(("device", "streams"), [("cpu", "late"), ("emulated", "later")])
def test_streams_that_cannot_be_ordered(device: str, streams: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RACES)
    with pytest.raises(UsageError, match=f"--streams {streams}"):
        diagnose_report(Script(str(path), device=device, streams=streams), Request())
