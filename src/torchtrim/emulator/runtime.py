"""Replace the functions of `torch.cuda` and `torch.accelerator`, and model the device's properties."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from torchtrim.dispatch.calls import tell_synchronized
from torchtrim.dispatch.patches import Patches
from torchtrim.emulator import streams
from torchtrim.emulator.kernels import Target
from torchtrim.emulator.moves import check_index, devices
from torchtrim.emulator.tags import HELD, Tags
from torchtrim.errors import Unsupported, UsageError
from torchtrim.memory.caching import CachingAllocator
from torchtrim.memory.settings import AllocatorSettings, parse_settings

_GIB = 2**30
_CUDNN = 91900  # The version of cuDNN that wheels of torch for CUDA 13 come with.


class DeviceModel(NamedTuple):
    """A device model, by its compute capability. `short`: its name on the command line, or empty."""

    name: str
    memory_bytes: int
    major: int
    minor: int
    processors: int
    short: str = ""

    def capability(self) -> tuple[int, int] | None:
        """Return the compute capability, or None for a device by AMD."""
        return None if "AMD" in self.name else (self.major, self.minor)

    def target(self) -> Target | None:
        """Return the device whose kernels run, or None for one by AMD, whose table is missing."""
        version = torch.__version__.split(".")
        numbers = (int(version[0]), int(version[1]))
        capability = self.capability()
        return None if capability is None else Target(capability, numbers, _CUDNN)

    def properties(self) -> SimpleNamespace:
        """Return the result of `get_device_properties`."""
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


MODELS: dict[str, DeviceModel] = {
    model.short: model
    for model in (
        DeviceModel("Tesla T4", 15 * _GIB, 7, 5, 40, "t4"),
        DeviceModel("Tesla V100-SXM2-32GB", 32 * _GIB, 7, 0, 80, "v100"),
        DeviceModel("NVIDIA A10G", 22 * _GIB, 8, 6, 80, "a10g"),
        DeviceModel("NVIDIA A100-SXM4-80GB", 79 * _GIB, 8, 0, 108, "a100"),
        DeviceModel("NVIDIA L4", 22 * _GIB, 8, 9, 58, "l4"),
        DeviceModel("NVIDIA L40S", 44 * _GIB, 8, 9, 142, "l40s"),
        DeviceModel("NVIDIA GeForce RTX 4090", 23 * _GIB, 8, 9, 128, "rtx4090"),
        DeviceModel("NVIDIA H100 80GB HBM3", 79 * _GIB, 9, 0, 132, "h100"),
        DeviceModel("NVIDIA H200", 139 * _GIB, 9, 0, 132, "h200"),
        DeviceModel("NVIDIA B200", 178 * _GIB, 10, 0, 148, "b200"),
        DeviceModel("AMD Instinct MI300X", 191 * _GIB, 9, 4, 304, "mi300x"),
    )
}
DEFAULT = MODELS["a100"]._replace(short="")


def model_named(name: str | None) -> DeviceModel:
    """Return the model of a name, or the default for None and `"emulated"`."""
    return MODELS.get(name or "", DEFAULT)


_SENSORS = (
    *("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"),
    "device_memory_used",
)


def _settings() -> AllocatorSettings:
    """Return the allocator's settings as PyTorch reads them at its first allocation: from the environment."""
    words = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    try:
        return parse_settings(words)
    except UsageError as error:
        warnings.warn(f"{error} The defaults are modelled instead.", stacklevel=2)
        return AllocatorSettings()


class Counters:
    """Byte counters of the emulated device's caching allocator."""

    def __init__(self, tags: Tags, model: DeviceModel) -> None:
        self._tags = tags
        self.allocator = CachingAllocator()
        self._blocks: dict[int, int] = {}
        self._total = model.memory_bytes

    def settle(self) -> CachingAllocator:
        """Return the allocator, updated with all events so far."""
        events = self._tags.events
        if events and not self.allocator.mallocs:
            self.allocator.settings = _settings()
        for number, size in events:
            if number == HELD:
                self.allocator.keep(size)
            elif size >= 0:
                self._blocks[number] = self.allocator.malloc(size)
            else:
                self.allocator.free(self._blocks.pop(number))
        events.clear()
        return self.allocator

    def reader(self, name: str) -> Callable[..., int]:
        """Return a function that returns one of the allocator's byte counts."""
        return lambda device=None: int(getattr(self.settle(), name))

    def empty(self) -> None:
        """Release unused memory. Synchronizes the device if there is any."""
        allocator = self.settle()
        before = allocator.reserved
        allocator.empty_cache()
        if allocator.reserved < before:
            tell_synchronized("empty-cache")

    def info(self, device: Any = None) -> tuple[int, int]:
        """Return the free and total bytes of the device."""
        return max(self._total - self.settle().reserved, 0), self._total

    def stats(self, device: Any = None) -> OrderedDict[str, int]:
        """Return the most used statistics."""
        allocator = self.settle()
        stats: OrderedDict[str, int] = OrderedDict()
        for name, current, peak in (
            ("allocated_bytes", allocator.allocated, allocator.peak_allocated),
            ("active_bytes", allocator.allocated, allocator.peak_allocated),
            ("reserved_bytes", allocator.reserved, allocator.peak_reserved),
        ):
            stats[f"{name}.all.current"] = current
            stats[f"{name}.all.peak"] = peak
        for name, made, ended in (
            ("allocation", allocator.mallocs, allocator.frees),
            ("active", allocator.mallocs, allocator.frees),
            ("segment", allocator.segments, allocator.released),
        ):
            stats[f"{name}.all.current"] = made - ended
            stats[f"{name}.all.allocated"] = made
            stats[f"{name}.all.freed"] = ended
        stats["inactive_split_bytes.all.current"] = allocator.split_bytes()
        stats["num_alloc_retries"] = stats["num_ooms"] = 0
        return stats

    def summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """Return the statistics as text."""
        return "\n".join(f"{name}: {value}" for name, value in self.stats().items())


class Runtime:
    """Replaces the functions of `torch.cuda` that need a driver."""

    def __init__(self, patches: Patches, tags: Tags, model: DeviceModel) -> None:
        self._patches = patches
        self._model = model
        self.counters = Counters(tags, model)
        self._debug_mode = 0

    def install(self) -> None:
        """Replace the functions."""
        for owner, functions in self._functions():
            for name, function in functions.items():
                if hasattr(owner, name):
                    same = _with_names_of(getattr(owner, name), function)
                    self._patches.replace(owner, name, same)
        for name in ("CUDAGraph", "graph", "make_graphed_callables"):
            self._patches.replace(torch.cuda, name, _refuses(f"torch.cuda.{name}"))
        for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
            self._patches.replace(torch.cuda.nvtx, name, _zero)

    def _functions(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        cuda = {
            **self._presence(),
            **self._memory(),
            **self._randomness(),
            **dict.fromkeys(("Stream", "ExternalStream"), streams.Stream),
            "Event": streams.EmulatedEvent,
            **dict.fromkeys(("stream", "StreamContext"), streams.stream),
            "set_stream": streams.set_stream,
            "current_stream": streams.current_stream,
            "default_stream": lambda device=None: streams.DEFAULT,
            "synchronize": _synchronize,
            "ipc_collect": _nothing,
            "set_sync_debug_mode": self._set_debug_mode,
            "get_sync_debug_mode": lambda: self._debug_mode,
            "is_current_stream_capturing": _false,
        }
        yield torch, {"Stream": streams.Stream, "Event": streams.EmulatedEvent}
        yield torch.cuda, cuda
        yield torch.cuda.profiler, {"start": _nothing, "stop": _nothing}
        yield torch.cuda.nccl, {"version": lambda: (2, 28, 9), "is_available": _false}
        yield torch.autograd.profiler, {"emit_nvtx": contextlib.nullcontext}
        yield torch.cuda.memory, self._memory()
        yield torch.cuda.random, self._randomness()
        yield torch.cuda.streams, {"Stream": streams.Stream, "Event": streams.EmulatedEvent}
        yield torch.accelerator, self._accelerator()
        yield torch.accelerator.memory, self._memory()
        yield torch._C, {"_get_accelerator": lambda check=None: torch.device("cuda")}
        yield torch.backends.cuda, {"is_built": _true}
        cudnn = {"is_available": _true, "is_acceptable": _false, "version": lambda: _CUDNN}
        yield torch.backends.cudnn, cudnn
        yield torch.version, {"cuda": "13.0"}
        yield torch.distributed, {"is_nccl_available": _false}

    def _presence(self) -> dict[str, Any]:
        properties = self._model.properties()
        return {
            **dict.fromkeys(("is_available", "is_initialized"), _true),
            **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), _true),
            **dict.fromkeys(("init", "_lazy_init"), _nothing),
            "device_count": devices,
            "current_device": lambda: 0,
            "set_device": _check_index,
            **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), lambda device: 0),
            **dict.fromkeys(("device", "device_of"), DeviceGuard),
            "can_device_access_peer": _false,
            "get_device_name": lambda device=None: properties.name,
            "get_device_capability": lambda device=None: (properties.major, properties.minor),
            "get_device_properties": lambda device=None: properties,
            "get_arch_list": lambda: [f"sm_{properties.major}{properties.minor}"],
            "get_gencode_flags": lambda: "",
            "cudart": _driver,
            "current_blas_handle": lambda: 0,
            **dict.fromkeys(_SENSORS, _zero),
        }

    def _memory(self) -> dict[str, Any]:
        counters = self.counters
        reserved, peak_reserved = counters.reader("reserved"), counters.reader("peak_reserved")
        resets = ("peak_memory_stats", "max_memory_allocated", "max_memory_cached")
        idle = (
            *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
            *("_record_memory_history", "_dump_snapshot"),
        )

        def reset_peaks(device: Any = None) -> None:
            counters.settle().reset_peaks()

        return {
            "memory_allocated": counters.reader("allocated"),
            "max_memory_allocated": counters.reader("peak_allocated"),
            **dict.fromkeys(("memory_reserved", "memory_cached"), reserved),
            **dict.fromkeys(("max_memory_reserved", "max_memory_cached"), peak_reserved),
            **{f"reset_{name}": reset_peaks for name in resets},
            **dict.fromkeys(idle, _nothing),
            "empty_cache": counters.empty,
            **dict.fromkeys(("mem_get_info", "get_memory_info"), counters.info),
            "memory_stats": counters.stats,
            "memory_summary": counters.summary,
            "memory_snapshot": lambda *args: [],
            "host_memory_stats": OrderedDict,
            "list_gpu_processes": lambda device=None: "no processes are running",
            "get_allocator_backend": lambda: "native",
        }

    def _randomness(self) -> dict[str, Any]:
        return {
            **dict.fromkeys(("manual_seed", "manual_seed_all"), _seed),
            **dict.fromkeys(("seed", "seed_all"), torch.seed),
            "initial_seed": torch.initial_seed,
            "get_rng_state": _random_state,
            "get_rng_state_all": lambda: [_random_state()],
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
            "default_generators": (torch.default_generator,),
        }

    def _accelerator(self) -> dict[str, Any]:
        return {
            **self._memory(),
            "is_available": _true,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "device_count": devices,
            **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: 0),
            **dict.fromkeys(("set_device_index", "set_device_idx"), _check_index),
            "device_index": DeviceGuard,
            "current_stream": streams.current_stream,
            "set_stream": streams.set_stream,
            "synchronize": _synchronize,
            "get_device_capability": lambda device=None: {},
        }

    def _set_debug_mode(self, mode: Any) -> None:
        names = {"default": 0, "warn": 1, "error": 2}
        self._debug_mode = names[mode] if isinstance(mode, str) else int(mode)


def _with_names_of(original: Any, function: Any) -> Any:
    """Make the function accept keyword arguments by the original's names."""
    if isinstance(function, type) or not callable(function):
        return function
    try:
        theirs, ours = inspect.signature(original), inspect.signature(function)
    except (TypeError, ValueError):
        return function
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ours.parameters.values())
    if takes_any or set(theirs.parameters) <= set(ours.parameters):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = theirs.bind(*args, **kwargs)
        return function(*bound.args, **bound.kwargs)

    return call


def _always(value: Any) -> Callable[..., Any]:
    """Return a function that returns the value, whatever its arguments."""
    return lambda *args, **kwargs: value


_nothing, _true, _false, _zero = map(_always, (None, True, False, 0))


def _synchronize(device: Any = None) -> None:
    tell_synchronized("synchronize")


def _check_index(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    check_index(None if index == -1 else index)


def _driver() -> SimpleNamespace:
    done = dict.fromkeys(("cudaProfilerStart", "cudaProfilerStop", "cudaDeviceSynchronize"), _zero)
    return SimpleNamespace(**done, cudaError=SimpleNamespace(success=0))


class DeviceGuard:
    """Replaces `torch.cuda.device`, which selects a device inside a block."""

    def __init__(self, device: Any) -> None:
        if device is not None and not isinstance(device, torch.Tensor):
            _check_index(device)
        self.idx = 0
        self.prev_idx = -1

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _random_state(device: Any = None) -> torch.Tensor:
    """Return the state of the one generator, in memory that is not torch's: a GPU's has 16 bytes."""
    state = bytearray(torch.get_rng_state().tolist())
    return torch.frombuffer(state, dtype=torch.uint8)


def _refuses(name: str) -> Callable[..., Any]:
    class Refused:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise Unsupported(
                f"{name} captures device work, which the emulated device does not support. Run the script "
                "without graphs, or on a GPU."
            )

    return Refused
