"""Measures the scratch memory of CPU kernels, which dispatch modes do not see.

It depends on the processor: the same convolution needs 2.3 MB of scratch with AVX-512, 0.8 MB with AMX and
2.7 MB with AVX2. So each distinct call of an operator with scratch runs once, on zeros.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from torchtrim.core import caches
from torchtrim.dispatch import profilers
from torchtrim.dispatch.modes import tensors_among
from torchtrim.dispatch.storages import element_bytes

_OWN_KERNELS = 2
"""Counts changes of the scratch memory of torchtrim's own operators: the version of torch does not tell."""
_MOST_BYTES = 2**28
"""Largest inputs and results of a measured call, so that an estimate stays cheap."""
_MOST_FLOPS, _MOST_FLOPS_OF_HALVES = 2**35, 2**31
"""About a second on one core. Half precision is emulated on processors without instructions for it."""
_RECURRENT = "aten::mkldnn_rnn_layer"
_PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"))
_SAMPLED_NAMES = """
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d upsample_nearest1d
    upsample_nearest2d _upsample_nearest_exact1d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_OTHER_NAMES = """
    _trilinear _fft_r2c _fft_c2r _fft_c2c sort kthvalue dist native_dropout_backward
    native_group_norm_backward soft_margin_loss_backward scatter scatter_reduce gather
"""
_MEASURED = frozenset(
    (
        *_PRODUCTS,
        *(f"aten::{name}{way}" for name in _SAMPLED_NAMES.split() for way in ("", "_backward")),
        *(f"aten::{name}" for name in _OTHER_NAMES.split()),
        "aten::convolution",
        "aten::_convolution",
        "aten::convolution_backward",
        _RECURRENT,
        f"{_RECURRENT}_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::native_batch_norm_backward",
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
        "aten::roll",
        "aten::_native_multi_head_attention",
        "torchtrim::relative_attention",
        "torchtrim::relative_attention_backward",
        "aten::_safe_softmax",
        "aten::logsumexp",
        "aten::native_dropout",
        "aten::mse_loss",
        "aten::smooth_l1_loss",
        "aten::huber_loss",
        "aten::binary_cross_entropy_with_logits",
    )
)
"""Operators with scratch memory."""
_ONEDNN_COMPUTES: dict[torch.dtype, Callable[[], bool]] = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}


def workspace(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the scratch bytes of an operator on the CPU, or None if the call cannot be tried here."""
    name = func.name().partition(".")[0]
    promoted = _promoted(args) if torch.Tag.pointwise in func.tags else 0
    # Among products, oneDNN packs the matrices of half precision that it supports.
    if name not in _MEASURED or (name in _PRODUCTS and not _packs(args[0].dtype)):
        return promoted
    if _is_large(name, func, args, kwargs, result):
        return None
    ours = _OWN_KERNELS if func.namespace == "torchtrim" else ""
    key = f"{func}{ours} {_key((args, kwargs))} {torch.get_num_threads()} {torch.is_grad_enabled()}"
    size = machine().once(key, lambda: _tried(func, name, args, kwargs))
    return None if size is None else size + promoted


def _packs(dtype: torch.dtype) -> bool:
    return dtype in _ONEDNN_COMPUTES and _ONEDNN_COMPUTES[dtype]()


def _promoted(args: Any) -> int:
    """Return the bytes of operands converted to a common dtype; 0-dim operands are not."""
    tensors = [tensor for tensor in args if isinstance(tensor, torch.Tensor) and tensor.dim()]
    if len({tensor.dtype for tensor in tensors}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    others = (tensor for tensor in tensors if tensor.dtype not in (common, torch.bool))
    return sum(tensor.numel() for tensor in others) * common.itemsize


def _is_large(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    tensors = [*tensors_among((args, *kwargs.values(), result))]
    halves = any(one.is_floating_point() and one.itemsize < 4 for one in tensors)
    most = _MOST_FLOPS_OF_HALVES if halves else _MOST_FLOPS
    size = sum(map(element_bytes, tensors))
    return size > _MOST_BYTES or _flops(name, func, args, kwargs, result) > most


def _flops(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the FLOPs of products and attention; 0 for elementwise operators."""
    if name.startswith(_RECURRENT):
        return int(6 * math.prod(args[0].shape[:-1]) * (args[1].numel() + args[2].numel()))
    if name == "aten::_native_multi_head_attention":
        samples, length, width = args[0].shape
        return int(4 * samples * length * width * (2 * width + length))
    if name.startswith("torchtrim::relative_attention"):
        backward = name.endswith("_backward")
        query, key, value = (one.shape for one in (args[3:6] if backward else args[:3]))
        count = 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        return int(5 * count // 2 if backward else count)
    from torch.utils import flop_counter  # It loads Triton.

    attention: Callable[..., int] = flop_counter.sdpa_flop_count
    attention_backward: Callable[..., int] = flop_counter.sdpa_backward_flop_count
    if name.endswith("attention_for_cpu"):
        return attention(*(one.shape for one in args[:3]))
    if name.endswith("attention_for_cpu_backward"):
        return attention_backward(*(one.shape for one in args[:4]))
    count = flop_counter.flop_registry.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _tried(func: Any, name: str, args: Any, kwargs: Any) -> int | None:
    """Return the bytes of one call on zeros, or None if it raises. Modes and the RNG are restored."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        state = torch.default_generator.get_state()
        try:
            given, named = tree_map_only(torch.Tensor, _zeros, ([*args], kwargs))
            if name == f"{_RECURRENT}_backward":
                given[-1] = _reserve(given)
            return needed(lambda: func(*given, **named))
        except (RuntimeError, ValueError, TypeError, IndexError, MemoryError, ArithmeticError):
            return None
        finally:
            torch.default_generator.set_state(state)


def _reserve(args: list[Any]) -> torch.Tensor:
    x, *weights, hidden, cell = args[:7]
    reverse, mode, size, layers, biases, train, both, sizes, first = args[13:22]
    with torch.enable_grad():
        kept: torch.Tensor = torch.ops.aten.mkldnn_rnn_layer.default(
            *(x, *weights, hidden, cell, reverse, sizes, mode, size, layers, biases, both, first),
            train,
        )[3]
    return kept


def _zeros(like: torch.Tensor) -> torch.Tensor:
    count = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    flat = torch.zeros(count + 1 if like.numel() else 0, dtype=like.dtype, device="cpu")
    return flat.as_strided(like.shape, like.stride())


def _key(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    if isinstance(value, dict):
        return " ".join(f"{name}={_key(one)}" for name, one in value.items())
    return f"[{' '.join(map(_key, value))}]" if isinstance(value, (list, tuple)) else repr(value)


_MAX_CALLS = 20_000
"""Arbitrary: a program makes a few hundred distinct calls. A file that outgrows this starts anew."""
_MAX_FILE_BYTES = 2**24
"""Several times the size of a file with `_MAX_CALLS` calls."""
_SETTINGS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


class _UndetectedProfile(profiler.profile):
    """A profiler that bypasses `dryrun.run`'s detection of the program's own."""

    _prepare: Any = profiler.profile._prepare_trace

    def _prepare_trace(self) -> None:
        self._prepare()


class _CallFile(msgspec.Struct, forbid_unknown_fields=True):
    machine: str
    calls: dict[str, int]


class Machine:
    """Scratch bytes measured on one machine. An unreadable file counts as empty and is replaced."""

    def __init__(self, name: str, path: Path | None) -> None:
        self.name = name
        self._path = path
        self._calls = self._read()
        self._failed: set[str] = set()
        self._is_saved = True
        self._may_try: bool | None = None

    def save(self) -> None:
        """Save the measured calls, merged with those other processes have saved since."""
        if self._is_saved or self._path is None:
            return
        self._is_saved = True
        self._calls = {**self._read(), **self._calls}
        if len(self._calls) > _MAX_CALLS:
            self._calls.clear()
        caches.write(self._path, msgspec.json.encode(_CallFile(self.name, self._calls)))

    def once(self, name: str, attempt: Callable[[], int | None]) -> int | None:
        """Return the bytes of the first attempt, or None if it failed or cannot be made now.

        A failed attempt is repeated in the next process, not in this one.
        """
        if name in self._calls or name in self._failed:
            return self._calls.get(name)
        if self._may_try is None:
            self._may_try = not profilers.waits_to_start()
        if not self._may_try or profilers.runs():
            return None
        size = attempt()
        if size is None:
            self._failed.add(name)
        else:
            self._calls[name] = size
            self._is_saved = False
        return size

    def may_try(self, allowed: bool | None) -> None:
        """Allow or forbid measuring, which needs the process's profiler; None: find out when needed."""
        self._may_try = allowed

    def _read(self) -> dict[str, int]:
        try:
            if self._path is None or self._path.stat().st_size > _MAX_FILE_BYTES:
                return {}
            file = msgspec.json.decode(self._path.read_bytes(), type=_CallFile)
        except (OSError, ValueError):
            return {}
        is_valid = file.machine == self.name and all(size >= 0 for size in file.calls.values())
        return file.calls if is_valid else {}


@functools.cache
def machine() -> Machine:
    """Return a description of this machine, as torch in this process sees it."""
    name = _name()
    short = hashlib.sha256(name.encode()).hexdigest()[:16]
    return Machine(name, caches.folder() / f"workspaces-{short}.json")


def needed(call: Callable[[], Any]) -> int:
    """Return the peak bytes a call allocates beyond its results."""
    with (
        _disable_current_modes(),
        torch.autocast("cpu", enabled=False),
        _UndetectedProfile(profile_memory=True) as seen,
    ):
        result = call()
    events: Any = seen.kineto_results
    level = highest = 0
    for event in events.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    storages = {one.untyped_storage() for one in tensors_among((result,))}
    return max(0, highest - sum(one.nbytes() for one in storages))


def _name() -> str:
    settings = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), *settings, _instructions())
    return " ".join(parts)


def _instructions() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor() or platform.machine()
