"""Snapshots of an allocator that no GPU was needed for."""

from __future__ import annotations

from typing import Any

import msgspec

from torchtrim.memory.caching import CachingAllocator
from torchtrim.memory.settings import parse_settings
from torchtrim.records.snapshot import Snapshot

MIB = 2**20


class Writer:
    """An allocator that writes down what it does, as PyTorch's does."""

    def __init__(self, conf: str = "", capacity: int | None = None) -> None:
        self.conf = conf
        self.events: list[dict[str, Any]] = []
        self.allocator = CachingAllocator(parse_settings(conf), capacity)
        self._live: dict[int, tuple[int, int]] = {}
        self._held: dict[int, int] = {}

    def malloc(self, size: int, frames: list[dict[str, Any]] | None = None) -> int:
        before = self._segments()
        handle = self.allocator.malloc(size)
        self._tell_segments(before)
        address = self.allocator.address(handle)
        assert address is not None
        self._live[handle] = (address, size)
        self._tell("alloc", address, size, frames)
        return handle

    def free(self, handle: int) -> None:
        address, size = self._live.pop(handle)
        self.allocator.free(handle)
        for action in ("free_requested", "free_completed"):
            self._tell(action, address, size)

    def empty_cache(self) -> None:
        before = self._segments()
        self.allocator.empty_cache()
        self._tell_segments(before)

    def snapshot(self, since: int = 0) -> Snapshot:
        return msgspec.convert(self.dumped(since), Snapshot)

    def dumped(self, since: int = 0) -> dict[str, Any]:
        """Return what `torch.cuda.memory._dump_snapshot` pickles."""
        segments = [
            {
                "address": blocks[0].address,
                "total_size": sum(block.size for block in blocks),
                "segment_type": "small" if blocks[0].pool.small else "large",
                "is_expandable": blocks[0].range_start is not None,
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size,
                        "state": "inactive" if block.free else "active_allocated",
                    }
                    for block in blocks
                ],
            }
            for blocks in self._runs()
        ]
        return {
            "segments": segments,
            "device_traces": [self.events[since:]],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.conf},
        }

    def _tell(
        self, action: str, address: int, size: int, frames: list[dict[str, Any]] | None = None
    ) -> None:
        event = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        self.events.append(event)

    def _runs(self) -> list[list[Any]]:
        blocks = {id(block): block for block in self.allocator._blocks.values()}
        for pool in self.allocator._pools.values():
            blocks |= {id(block): block for _, _, block in pool.blocks}
        runs = []
        for block in blocks.values():
            if block.before is None or not block.before.mapped:
                run = [block]
                while run[-1].after is not None and run[-1].after.mapped:
                    run.append(run[-1].after)
                runs.append(run)
        return runs

    def _segments(self) -> dict[int, tuple[int, bool]]:
        found = {}
        for run in self._runs():
            page = 2 * MIB if run[0].range_start is not None else 0
            first, size = run[0].address, sum(block.size for block in run)
            for address in range(first, first + size, page or size):
                found[address] = (page or size, bool(page))
        return found

    def _tell_segments(self, before: dict[int, tuple[int, bool]]) -> None:
        after = self._segments()
        for address, (size, page) in sorted(before.items()):
            if address not in after:
                self._tell("segment_unmap" if page else "segment_free", address, size)
        for address, (size, page) in sorted(after.items()):
            if address not in before:
                self._tell("segment_map" if page else "segment_alloc", address, size)


def leave_holes(writer: Writer) -> None:
    """Leave holes that only expandable segments can use."""
    at = [{"filename": "/me/train.py", "line": 3, "name": "step"}]
    first = [writer.malloc(30 * MIB, at) for _ in range(4)]
    kept = writer.malloc(11 * MIB, [{"filename": "/me/model.py", "line": 9, "name": "forward"}])
    for handle in first:
        writer.free(handle)
    for _ in range(3):
        writer.malloc(38 * MIB, at)
    writer.free(kept)
