"""The devices that can be emulated: what a program can ask them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

_GIB = 2**30


class DeviceModel(NamedTuple):
    """Name, memory in bytes, compute capability and multiprocessors, as `get_device_properties` says.

    `short` is what the command line calls it; empty for the default.
    """

    name: str
    memory_bytes: int
    major: int
    minor: int
    processors: int
    short: str = ""

    def properties(self) -> SimpleNamespace:
        """The emulated properties of a device."""
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


def _model(short: str, name: str, gib: int, capability: float, processors: int) -> DeviceModel:
    major, minor = divmod(round(capability * 10), 10)
    return DeviceModel(name, gib * _GIB, major, minor, processors, short)


MODELS: dict[str, DeviceModel] = {
    model.short: model
    for model in (
        _model("t4", "Tesla T4", 15, 7.5, 40),
        _model("v100", "Tesla V100-SXM2-32GB", 32, 7.0, 80),
        _model("a10g", "NVIDIA A10G", 22, 8.6, 80),
        _model("a100", "NVIDIA A100-SXM4-80GB", 79, 8.0, 108),
        _model("l4", "NVIDIA L4", 22, 8.9, 58),
        _model("l40s", "NVIDIA L40S", 44, 8.9, 142),
        _model("rtx4090", "NVIDIA GeForce RTX 4090", 23, 8.9, 128),
        _model("h100", "NVIDIA H100 80GB HBM3", 79, 9.0, 132),
        _model("h200", "NVIDIA H200", 139, 9.0, 132),
        _model("b200", "NVIDIA B200", 178, 10.0, 148),
        _model("mi300x", "AMD Instinct MI300X", 191, 9.4, 304),
    )
}
DEFAULT = MODELS["a100"]._replace(short="")
"""The model to emulate where no name was given."""


def model_named(name: str | None) -> DeviceModel:
    """The device of a name, the default for None and for `"emulated"`."""
    return MODELS.get(name or "", DEFAULT)
