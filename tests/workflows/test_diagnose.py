"""Files and folders -> one report."""

import subprocess
import sys
from pathlib import Path

import pytest

from recordings import training
from torchtrim.errors import UnreadableInput
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
