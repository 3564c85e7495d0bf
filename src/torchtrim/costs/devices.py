"""Accelerators by name, with peak rates from their makers and latencies from traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchtrim.errors import UsageError

_TRACES = "https://github.com/facebookresearch/HolisticTraceAnalysis/tree/f4d0062/tests/data"
_LENS = "https://github.com/AMD-AGI/TraceLens/tree/171dd747/tests/traces"
_KINETO = "https://github.com/pytorch/kineto/tree/94979607%5E/tb_plugin/samples"


@dataclass(frozen=True, kw_only=True, eq=False)
class Device:
    """One accelerator. Rates are per second: floating-point operations by dtype, and bytes.

    `flops` has dense rates, `tf32` apart from `float32` because PyTorch does not use it by default for
    matrix products. `link` is the bandwidth to the host in one direction. `launch` is the time in seconds
    from the launch call to the start of the kernel on an idle stream, and `call` how long the call keeps the
    host; both are medians of the trace named in `measured_on`. `floor` is the time in seconds of the
    smallest kernels: a tenth of those in that trace take no longer. `source` cites the rates.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    launch: float
    call: float
    floor: float
    source: str
    measured_on: str

    def peak(self, dtype: str) -> float:
        """Return the floating-point operations a second of matrix products in a dtype, by default the
        float32 rate."""
        return self.flops.get(dtype, self.flops["float32"])


def _flops(
    half: float, single: float, double: float, tf32: float | None = None, brain: bool = True
) -> dict[str, float]:
    """Convert teraflops to rates; bfloat16 runs at the rate of float16 if the hardware supports it."""
    return {
        "float16": half * 1e12,
        "bfloat16": (half if brain else single) * 1e12,
        "tf32": (tf32 or single) * 1e12,
        "float32": single * 1e12,
        "float64": double * 1e12,
    }


_GEN3, _GEN4, _GEN5 = 15.75e9, 31.5e9, 63.0e9
_AMPERE: Mapping[str, float | str] = {
    "launch": 8.0e-6,
    "call": 6.0e-6,
    "floor": 3.0e-6,
    "measured_on": f"{_TRACES}/trace_diff/control",
}
_VOLTA: Mapping[str, float | str] = {
    "launch": 11.0e-6,
    "call": 9.0e-6,
    "floor": 1.0e-6,
    "measured_on": f"{_KINETO}/resnet50_num_workers_0",
}
_HOPPER: Mapping[str, float | str] = {
    "launch": 6.8e-6,
    "call": 3.3e-6,
    "floor": 2.2e-6,
    "measured_on": f"{_LENS}/h100",
}


def _device(
    name: str,
    flops: dict[str, float],
    bandwidth: float,
    link: float,
    latencies: Mapping[str, float | str],
    source: str,
) -> Device:
    return Device(
        name=name,
        flops=flops,
        bandwidth=bandwidth,
        link=link,
        launch=float(latencies["launch"]),
        call=float(latencies["call"]),
        floor=float(latencies["floor"]),
        source=source,
        measured_on=str(latencies["measured_on"]),
    )


_ALL = (
    _device(
        "t4",
        _flops(65, 8.1, 0.25, brain=False),
        300e9,
        _GEN3,
        _VOLTA,
        "https://www.nvidia.com/en-us/data-center/tesla-t4/",
    ),
    _device(
        "v100",
        _flops(125, 15.7, 7.8, brain=False),
        900e9,
        _GEN3,
        _VOLTA,
        "https://www.nvidia.com/en-gb/data-center/tesla-v100/",
    ),
    _device(
        "a10g",
        _flops(70, 35, 0.55, 35),
        600e9,
        _GEN4,
        _AMPERE,
        "https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/",
    ),
    _device(
        "a100",
        _flops(312, 19.5, 9.7, 156),
        2039e9,
        _GEN4,
        _AMPERE,
        "https://www.nvidia.com/en-us/data-center/a100/",
    ),
    _device(
        "l4",
        _flops(121, 30.3, 0.47, 60),
        300e9,
        _GEN4,
        _HOPPER,
        "https://www.nvidia.com/en-us/data-center/l4/",
    ),
    _device(
        "l40s",
        _flops(362, 91.6, 1.4, 183),
        864e9,
        _GEN4,
        _HOPPER,
        "https://www.nvidia.com/en-us/data-center/l40s/",
    ),
    _device(
        "rtx4090",
        _flops(165.2, 82.6, 1.3, 82.6),
        1008e9,
        _GEN4,
        _HOPPER,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
    _device(
        "h100",
        _flops(989, 67, 34, 494),
        3350e9,
        _GEN5,
        _HOPPER,
        "https://www.nvidia.com/en-us/data-center/h100/",
    ),
    _device(
        "h200",
        _flops(989, 67, 34, 494),
        4800e9,
        _GEN5,
        _HOPPER,
        "https://www.nvidia.com/en-us/data-center/h200/",
    ),
    _device(
        "b200",
        _flops(2250, 80, 40, 1100),
        8000e9,
        _GEN5,
        {"launch": 10.1e-6, "call": 6.9e-6, "floor": 2.8e-6, "measured_on": f"{_LENS}/b200"},
        "https://glennklockwood.com/garden/processors/B200",
    ),
    _device(
        "mi300x",
        _flops(1307.4, 163.4, 81.7, 653.7),
        5300e9,
        _GEN5,
        {"launch": 24.0e-6, "call": 4.2e-6, "floor": 4.5e-6, "measured_on": f"{_LENS}/mi300"},
        "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    ),
)
DEVICES: dict[str, Device] = {device.name: device for device in _ALL}


def device_named(name: str) -> Device:
    """Return the device of that name. Raises `UsageError`, listing all names, if there is none."""
    found = DEVICES.get(name.lower().replace("-", "").replace(" ", ""))
    if found is None:
        raise UsageError(f"unknown device {name!r}; known are {', '.join(sorted(DEVICES))}.")
    return found
