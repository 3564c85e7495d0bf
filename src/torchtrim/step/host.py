"""What edits put into memory of the host: how much, and where in one block of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchtrim.memory.packing import Buffer, Packing, pack
from torchtrim.step.edits import Block, Edit
from torchtrim.step.step import DEVICE

ALIGNMENT = 256
"""Offsets are multiples of it, in bytes."""


def host_blocks(edit: Edit) -> list[Block]:
    """What an edit puts into memory of the host."""
    return [block for block in edit.blocks if block.pool != DEVICE]


def packed(blocks: Sequence[Block]) -> Packing:
    """Offsets of blocks in one, by their number."""
    buffers = [
        Buffer(number, block.first, block.last, block.bytes, ALIGNMENT)
        for number, block in enumerate(blocks)
    ]
    return pack(buffers, seconds=0)


def host_peak(edits: Iterable[Edit]) -> int:
    """The bytes of the host's memory that edits take, in one block."""
    return packed([block for edit in edits for block in host_blocks(edit)]).height
