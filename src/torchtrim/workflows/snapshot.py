"""Explains a memory snapshot of `torch.cuda.memory._dump_snapshot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torchtrim.records.snapshot_report import SnapshotReport
from torchtrim.traces.snapshots.reader import read_snapshot
from torchtrim.traces.snapshots.story import SETTINGS, analyse_snapshot


def snapshot_report(
    path: Path,
    *,
    settings: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> SnapshotReport:
    """Return who holds the peak, what is reserved but unused, and what other settings would hold.

    `settings`: more values of `PYTORCH_CUDA_ALLOC_CONF` to try. Nothing in the file is run.
    Raises `UnreadableInput` for anything but a snapshot, `UsageError` for a setting that is not modelled.
    """
    progress(f"reading {path.name}")
    tried = tuple(dict.fromkeys((*SETTINGS, *settings)))
    return analyse_snapshot(read_snapshot(path), str(path), settings=tried, progress=progress)
