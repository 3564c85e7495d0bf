"""Accelerators by name, with peak rates from their makers and latencies from traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchtrim.errors import UsageError

_TRACES = "https://github.com/facebookresearch/HolisticTraceAnalysis/tree/f4d0062/tests/data"
_LENS = "https://github.com/AMD-AGI/TraceLens/tree/171dd747/tests/traces"
_KINETO = "https://github.com/pytorch/kineto/tree/94979607%5E/tb_plugin/samples"


@dataclass(frozen=True, eq=False)
class DeviceSpec:
    """One accelerator. Rates are per second: floating-point operations by dtype, and bytes.

    `flops` has dense rates, `tf32` separate from `float32` because PyTorch does not use it by default for
    matrix products. `link`: the bandwidth to the host in one direction. `source` cites the rates, except
    those that are `guessed`.

    Seconds, from the trace `measured_on`: `launch`, the median from the launch call to the start of the
    kernel on an idle stream; `call`, the median time that the call keeps the host; `floor`, the time of the
    smallest kernels, the first decile.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    source: str
    launch: float
    call: float
    floor: float
    measured_on: str
    guessed: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Return the floating-point operations a second of matrix products; unknown dtypes are float32."""
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


_GEN3, _GEN4, _GEN5 = 15.75e9, 31.5e9, 63.0e9  # PCIe x16, in one direction.
_VOLTA = 11.0e-6, 9.0e-6, 1.0e-6, f"{_KINETO}/resnet50_num_workers_0"
_AMPERE = 8.0e-6, 6.0e-6, 3.0e-6, f"{_TRACES}/trace_diff/control"
_HOPPER = 6.8e-6, 3.3e-6, 2.2e-6, f"{_LENS}/h100"
_BLACKWELL = 10.1e-6, 6.9e-6, 2.8e-6, f"{_LENS}/b200"
_CDNA = 24.0e-6, 4.2e-6, 4.5e-6, f"{_LENS}/mi300"
_A10G = "https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/"
_VOLTA_TURING = "https://hmc-tech.com/gpu/nvidia-t4-vs-nvidia-v100-sxm"
_L4 = "https://fpsbench.com/compare/gpu/nvidia-l4-vs-nvidia-tesla-m40"  # its tensor cores: 2 and 4 times FP32
_L40S = "https://www.mullet.se/product.html?product_id=355414"
_RTX4090 = "https://waredb.com/processor/nvidia-geforce-rtx-4090"
_GARDEN = "https://glennklockwood.com/garden/processors"  # it cites NVIDIA's datasheets
_MI300X = "https://github.com/alpharomercoma/MI300X-vs-H200/blob/6077fdc7/METHODOLOGY.md"

_ALL = (
    DeviceSpec("t4", _flops(65, 8.1, 0.25, brain=False), 320e9, _GEN3, _VOLTA_TURING, *_VOLTA),
    DeviceSpec("v100", _flops(125, 15.7, 7.8, brain=False), 900e9, _GEN3, _VOLTA_TURING, *_VOLTA),
    DeviceSpec("a10g", _flops(70, 35, 0.55, 35), 600e9, _GEN4, _A10G, *_AMPERE),
    DeviceSpec("a100", _flops(312, 19.5, 9.7, 156), 2039e9, _GEN4, f"{_GARDEN}/A100", *_AMPERE),
    DeviceSpec("l4", _flops(121, 30.3, 0.47, 60), 300e9, _GEN4, _L4, *_HOPPER),
    DeviceSpec("l40s", _flops(362, 91.6, 1.4, 183), 864e9, _GEN4, _L40S, *_HOPPER),
    DeviceSpec("rtx4090", _flops(165.2, 82.6, 1.29, 82.6), 1008e9, _GEN4, _RTX4090, *_HOPPER),
    DeviceSpec("h100", _flops(989, 67, 34, 494), 3350e9, _GEN5, f"{_GARDEN}/h100", *_HOPPER),
    DeviceSpec("h200", _flops(989, 67, 34, 494), 4800e9, _GEN5, f"{_GARDEN}/h100", *_HOPPER),
    DeviceSpec("b200", _flops(2250, 80, 40, 1100), 8000e9, _GEN5, f"{_GARDEN}/B200", *_BLACKWELL),
    DeviceSpec(
        *("mi300x", _flops(1307.4, 163.4, 81.7, 653.7), 5300e9, _GEN5, _MI300X, *_CDNA),
        guessed=("float32", "tf32", "float64"),
    ),
)
DEVICES: dict[str, DeviceSpec] = {device.name: device for device in _ALL}


def device_named(name: str) -> DeviceSpec:
    """Return the device of that name. Raises `UsageError` with all names for an unknown one."""
    device = DEVICES.get(name.lower().replace("-", "").replace(" ", ""))
    if device is None:
        raise UsageError(f"unknown device {name!r}; known are {', '.join(sorted(DEVICES))}.")
    return device


def guess_note(profiled: str) -> str:
    """Return the report's note about rates of a profile's emulated device that have no source."""
    device = DEVICES.get(profiled.removeprefix("emulated "))
    if device is None or not device.guessed:
        return ""
    return (
        f"the {device.name.upper()}'s rates for {', '.join(device.guessed)} are a guess, and so are times "
        "that are modelled from them"
    )
