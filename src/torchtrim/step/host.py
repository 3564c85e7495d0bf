"""What edits put into memory of the host or a file: how much, and where in one block of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchtrim.memory.packing import Buffer, Packing, pack
from torchtrim.step.edits import Block, Edit
from torchtrim.step.step import DEVICE

ALIGNMENT = 256
"""Offsets are multiples of it, in bytes."""


PINNED = "pinned"
"""The pool of the host's pinned memory."""
FILE = "file"
"""The pool of memory-mapped files, which counts for no budget."""
DISK = 2e9
"""Bytes a second that a file takes or gives: what NVMe drives write in the long run, their makers say."""


def host_blocks(edit: Edit) -> list[Block]:
    """What an edit puts into memory of the host, or into a file."""
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
    blocks = (block for edit in edits for block in host_blocks(edit))
    return packed([block for block in blocks if block.pool != FILE]).height
