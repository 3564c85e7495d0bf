"""Reads a memory snapshot from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from torchtrim.errors import UnreadableInput
from torchtrim.records.files import MOST_BYTES, read_bounded, without_collection
from torchtrim.records.snapshot import Snapshot
from torchtrim.traces.snapshots.pickled import load_plain

_MOST_EVENTS = 5_000_000  # PyTorch keeps 100,000 unless it is told to keep more.


def read_snapshot(path: Path) -> Snapshot:
    """Read what `torch.cuda.memory._dump_snapshot` wrote, without running it.

    Raises `UnreadableInput` where it is missing, damaged, or something else.
    """
    data = read_bounded(path, MOST_BYTES)
    if not data:
        raise UnreadableInput(f"{path} is empty. Write the snapshot again.")
    with without_collection():
        plain = load_plain(data, str(path))
        _check_events(plain, path)
        try:
            snapshot = msgspec.convert(plain, Snapshot, strict=False)
        except msgspec.ValidationError as error:
            raise UnreadableInput(
                f"{path} is a pickle but no memory snapshot of the CUDA allocator: {error}. "
                "Write one with torch.cuda.memory._dump_snapshot(FILE)."
            ) from None
    for segment in snapshot.segments:
        _place(segment.blocks, segment.address)
    return snapshot


def _check_events(plain: Any, path: Path) -> None:
    """Bound what is converted: a list that a pickle refers to often is stored once."""
    if not isinstance(plain, dict):
        return
    count = 0
    for key, inner in (("device_traces", None), ("segments", "blocks")):
        rows = plain.get(key)
        for row in rows if isinstance(rows, list) else ():
            items = row.get(inner) if inner and isinstance(row, dict) else row
            count += 1 + (len(items) if isinstance(items, list) else 0)
            if count > _MOST_EVENTS:
                raise UnreadableInput(
                    f"{path} holds more than {_MOST_EVENTS:,} events and blocks. Record fewer: "
                    "torch.cuda.memory._record_memory_history(max_entries=100000)."
                )


def _place(blocks: list[Any], address: int) -> None:
    """Give blocks of older snapshots, which lack them, their addresses."""
    for block in blocks:
        if block.address < 0:
            block.address = address
        address = block.address + block.size
