"""The devices that can be emulated: what a program can ask them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

_GIB = 2**30


class DeviceModel(NamedTuple):
    """Name, memory in bytes, compute capability and multiprocessors, as `get_device_properties` says."""

    name: str
    memory_bytes: int
    major: int
    minor: int
    processors: int

    def properties(self) -> SimpleNamespace:
        """What stands for the properties of a device."""
        return SimpleNamespace(
            name=f"{self.name} (emulated)",
            major=self.major,
            minor=self.minor,
            total_memory=self.memory_bytes,
            multi_processor_count=self.processors,
            warp_size=32,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=101376,
            L2_cache_size=40 * 2**20,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName="",
            uuid="emulated",
        )


A100 = DeviceModel("NVIDIA A100-SXM4-80GB", 80 * _GIB, 8, 0, 108)
