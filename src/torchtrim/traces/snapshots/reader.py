"""Reads a memory snapshot from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from torchtrim.core.units import format_bytes
from torchtrim.errors import UnreadableInput
from torchtrim.records.files import MOST_BYTES, read_bounded, without_collection
from torchtrim.records.snapshot import Snapshot
from torchtrim.traces.snapshots.pickled import load_plain

_MOST_EVENTS = 5_000_000  # PyTorch keeps 100,000 unless it is told to keep more.
_FEW = 1000  # Never too many.
_LEAST_BYTES = (
    16  # Of an event or a block in a file: a pickle may refer to one of them millions of times.
)
_MOST_HELD = 2**42  # Bytes of all segments: twice those of eight devices with 288 GB.
_MOST_MAPPED = 2**44  # Bytes that expandable segments map and unmap; a replay looks at each page.


def read_snapshot(path: Path) -> Snapshot:
    """Read what `torch.cuda.memory._dump_snapshot` wrote, without running it.

    Raises `UnreadableInput` where it is missing, damaged, or something else.
    """
    data = read_bounded(path, MOST_BYTES)
    if not data:
        raise UnreadableInput(f"{path} is empty. Write the snapshot again.")
    with without_collection():
        plain = load_plain(data, str(path))
        _check_events(plain, path, min(_MOST_EVENTS, _FEW + len(data) // _LEAST_BYTES))
        try:
            snapshot = msgspec.convert(plain, Snapshot, strict=False)
        except msgspec.ValidationError as error:
            raise UnreadableInput(
                f"{path} is a pickle but no memory snapshot of the CUDA allocator: {error}. "
                "Write one with torch.cuda.memory._dump_snapshot(FILE)."
            ) from None
    _check_pages(snapshot, path)
    for segment in snapshot.segments:
        _place(segment.blocks, segment.address)
    return snapshot


def _check_events(plain: Any, path: Path, most: int) -> None:
    """Bound what is converted: a list that a pickle refers to often is stored once."""
    if not isinstance(plain, dict):
        return
    count = 0
    for key, inner in (("device_traces", None), ("segments", "blocks")):
        rows = plain.get(key)
        for row in rows if isinstance(rows, list) else ():
            items = row.get(inner) if inner and isinstance(row, dict) else row
            count += 1 + (len(items) if isinstance(items, list) else 0)
            if count > most:
                raise UnreadableInput(
                    f"{path} refers to more than {most:,} events and blocks, too many for its size or at "
                    "all. Record fewer: torch.cuda.memory._record_memory_history(max_entries=100000)."
                )


def _check_pages(snapshot: Snapshot, path: Path) -> None:
    """Bound the pages that a replay looks at."""
    held = sum(segment.total_size for segment in snapshot.segments)
    mapped = sum(
        event.size
        for events in snapshot.device_traces
        for event in events
        if event.action in ("segment_map", "segment_unmap")
    )
    if held > _MOST_HELD or mapped > _MOST_MAPPED:
        raise UnreadableInput(
            f"{path} is damaged: its segments hold {format_bytes(held)} and map {format_bytes(mapped)}, "
            "which no devices have. Write it again with torch.cuda.memory._dump_snapshot."
        )


def _place(blocks: list[Any], address: int) -> None:
    """Give blocks of older snapshots, which lack them, their addresses."""
    for block in blocks:
        if block.address < 0:
            block.address = address
        address = block.address + block.size
