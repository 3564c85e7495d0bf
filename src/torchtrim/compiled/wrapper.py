"""Runs of Inductor's code without kernels: which bytes are allocated, and when.

Inductor's code allocates, reuses and frees buffers line by line, and calls kernels in between. Here it runs
on fake tensors with kernels that do nothing, so that its memory is known without a compiler, and without
the memory. What a library's kernel allocates for itself, such as a convolution's workspace, is measured
once for each kernel and shape, on tensors of zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from torchtrim.capture.allocator import CpuAllocator
from torchtrim.compiled.code import Code, Spec
from torchtrim.compiled.inductor import loaded

Rises = dict[tuple[Any, ...], int]
_SKIPPED = ("empty", "as_strided", "detach", "new_empty")
"""Operators that allocate what they return and nothing else."""


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of the tensors alive. `curve`: the level after each change, and each rise.

    `kernels`: the kernels of libraries, and how long the curve is when each ends. `rises`: by how much memory
    rises inside them, by kernel and shape, which a meter adds to.
    """

    supports_higher_order_operators = True

    def __init__(self, rises: Rises | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.level = 0
        self.curve: list[int] = [0]
        self.kernels: list[tuple[str, int]] = []
        self.unmeasured: set[str] = set()
        self._pauses = False
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rises = {} if rises is None else rises

    def uncounted(self, spec: Spec | int | None) -> Any:
        """Return a tensor that is not the graph's own, such as a parameter, and leave it out."""
        self._pauses = True
        value = like(spec)
        self._pauses = False
        return value

    def count(self, value: Any) -> None:
        """Count a tensor's storage until it is freed."""
        if not isinstance(value, torch.Tensor) or value.untyped_storage() in self._known:
            return
        storage = value.untyped_storage()
        self._known.add(storage)
        if self._pauses:
            return
        self._move(storage.nbytes())
        weakref.finalize(storage, self._move, -storage.nbytes())

    def passes(self, size: int) -> None:
        """Note a rise that is over when its kernel ends."""
        self.curve += [self.level + size, self.level]

    def _move(self, size: int) -> None:
        self.level += size
        self.curve.append(self.level)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Others call an operator, as with the states of a generator.
        if isinstance(func, OpOverload):
            name = func.overloadpacket.__name__
            if not func.is_view and not name.startswith(_SKIPPED):
                self.library(name, func, args, kwargs)
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            self.count(value)
        return result

    def library(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note the rise inside a kernel of a library."""
        key = name, *(_key(value) for value in tree_leaves((args, kwargs)))
        if key not in self._rises:
            with _disable_current_modes():
                try:
                    self._rises[key] = _measured(func, args, kwargs)
                except Exception:  # a kernel that refuses zeros, or another device's
                    self._rises[key] = 0
                    self.unmeasured.add(name)
        if self._rises[key]:
            self.passes(self._rises[key])
        self.kernels.append((name, len(self.curve)))


def like(spec: Spec | int | None) -> Any:
    """Return a tensor like a spec; a number as it is."""
    return spec.empty() if isinstance(spec, Spec) else spec


def _key(value: Any) -> Any:
    return Spec.of(value) if isinstance(value, torch.Tensor) else repr(value)


def _measured(func: Callable[..., Any], args: Any, kwargs: Any) -> int:
    """Return the highest bytes over the start while a kernel runs, its results included."""
    args, kwargs = tree_map(_zeros, (args, kwargs))
    func(*args, **kwargs)  # the first call of a shape may create what the library keeps
    watched = CpuAllocator()
    watched.start()
    kept = func(*args, **kwargs)
    peak = watched.stop().peak
    del kept
    return peak


def _zeros(value: Any) -> Any:
    return Spec.of(value).empty().zero_() if isinstance(value, torch.Tensor) else value


class _Libraries:
    """The kernels that Inductor calls with a result to write to, or that return one."""

    def __init__(self, real: Any, meter: Meter) -> None:
        self._real = real
        self._meter = meter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(self._real, name)

        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return real(*args, **kwargs)
            self._meter.library(name, real, args, {**kwargs, "out": out})
            return out

        return call


def runnable(code: Code, meter: Meter) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a graph's `call`, which allocates fake tensors and computes nothing."""
    constants = {name: meter.uncounted(spec) for name, spec in code.constants.items()}
    module = loaded(code, constants)
    for name in ("cpu", "cpu_pinned", "cuda"):
        if hasattr(module, f"empty_strided_{name}"):
            setattr(module, f"empty_strided_{name}", _empty(name.split("_")[0]))
    module.reinterpret_tensor = _reinterpret
    module.assert_size_stride = module.assert_alignment = _nothing
    module.extern_kernels = _Libraries(module.extern_kernels, meter)
    call: Callable[[list[Any]], Sequence[Any]] = module.call
    return call


def _empty(device: str) -> Callable[..., torch.Tensor]:
    def empty(sizes: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


def _reinterpret(base: torch.Tensor, sizes: Any, strides: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(base, sizes, strides, int(base.storage_offset()) + offset)


def _nothing(*_: Any, **__: Any) -> None:
    pass
