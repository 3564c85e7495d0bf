"""A run of the original with each number moved by one unit in the last place, as rounding moves it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_map

from torchtrim.dispatch.modes import call_operator, tensors_among
from torchtrim.dispatch.storages import parts_of
from torchtrim.emulator.device import current
from torchtrim.runner.convolutions import by_shifts, shifts

_POOL = 131_071
"""Signs that are drawn once and used from random places. A prime, so that rows do not repeat them."""
_POOLS = 16  # sizes of which the factors are kept, 2 MiB each: as many as most programs have
_LOOKED_AT = 1024
"""Values of a tensor that are looked at: if one of them is a whole number, all whole numbers stay."""
_MORE = 8192  # values looked at where the first are zeros; arbitrary
_TYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_DRAWN = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_NARROW = (torch.bfloat16, torch.float16)
_EXACT_NAMES = """
    abs alias clamp clamp_max clamp_min clamp_tensor clone copy copy_ copysign detach fill fill_ floor fmax
    fmin heaviside isnan lift_fresh masked_fill masked_fill_ maximum minimum nan_to_num neg neg_ positive
    relu relu_ round ceil trunc sign sgn threshold threshold_backward where zero zero_ hardtanh hardtanh_
    hardtanh_backward _foreach_abs _foreach_abs_ _foreach_neg _foreach_neg_ _foreach_sign _foreach_sign_
    _foreach_copy _foreach_copy_ _foreach_zero_ _foreach_maximum _foreach_maximum_ _foreach_minimum
    _foreach_minimum_ _foreach_clamp_min
    _foreach_clamp_max
"""
_EXACT = frozenset(_EXACT_NAMES.split())
_DRAWS_NAMES = """
    uniform_ normal_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_ bernoulli multinomial rand randn
    rand_like randn_like
"""
_DRAWS = frozenset(_DRAWS_NAMES.split())
_SUMS = re.compile(
    r"mm|mv|dot|conv|linear|norm|sum|mean|var|std|softmax|attention|avg_pool|loss|dense_backward|embedding_bag|"
    r"prod|lstm|gru|rnn|fft|linalg|dist|grid_sampler|upsample|scatter_add|scatter_reduce|index_add|_backward"
)
_MATRIX = re.compile(r"mm_?$|mm_dtype$")


class Perturbed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that moves results of operators up or down at random by one unit in the last place.

    A sum of n products in another order differs by up to about sqrt(n) units of its parts, so before an
    operator that sums, its inputs move by that many. Results without rounding stay: copies, comparisons,
    and whole numbers, such as counts and masks. `-seed` moves everything the other way; with 0,
    nothing moves. In float64, random numbers are drawn in float32, so that a program takes the path that it
    takes there. `narrow`: also move what is or becomes bfloat16 or float16, where a rounding is much more,
    for runs in float32 alone.
    """

    def __init__(self, seed: int, *, narrow: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._narrow = seed, narrow
        self._types = (*_TYPES, *_NARROW) if narrow else _TYPES
        self._places = random.Random(abs(seed))
        self._pools: dict[tuple[torch.device, torch.dtype, float], torch.Tensor] = {}
        self._signs = torch.empty(0, dtype=torch.int8, device="cpu")
        self._kinds: dict[Any, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # such as a DTensor, which calls operators on its parts
        kwargs = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            casts = self._narrow and func is torch.ops.aten._to_copy.default
            kind = self._kinds[func] = "round" if casts else _kind(func)
        if kind == "draw":
            with torch._C.DisableTorchFunction():
                return _drawn(func, args, kwargs)
        if kind == "exact" or not self._seed:
            return _computed(func, args, kwargs)
        if kind == "sum":
            size = math.sqrt(_terms(func, args))
            names = [argument.name for argument in func._schema.arguments]
            args = tuple(
                # `native_batch_norm` writes its running statistics without saying so.
                one
                if name.startswith("running_")
                else tree_map(lambda v: self._moved_copy(v, size), one)
                for name, one in zip(names, args, strict=False)
            )
        result = _computed(func, args, kwargs)
        for tensor in filter(self._is_moved, _results(func, args, kwargs, result)):
            self._move(tensor, 1.0)
        return result

    def moved(self, value: Any, size: float = 1.0) -> Any:
        """Return a value moved by `size` units in the last place; anything but a wide tensor as it is."""
        if not self._is_moved(value):
            return value
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            copy = value.clone()
        with torch.no_grad():  # backward passes by the move, as by rounding
            self._move(copy, size)
        _tag_as(value, copy)
        return copy

    def _moved_copy(self, value: Any, size: float) -> Any:
        """Return what `moved` does, for a value below autograd, reading it only once."""
        if not self._is_moved(value):
            return value
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            copy = torch.empty_like(value)
        if not _is_dense(value) or copy.stride() != value.stride():
            return self.moved(value, size)
        self._move(copy, size, value)
        _tag_as(value, copy)
        return copy

    def _is_moved(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and type(value) in (torch.Tensor, nn.Parameter)
            and value.dtype in self._types
            and value.layout is torch.strided
            and value.device.type != "meta"
            and not (value.is_conj() or value.is_neg())  # a view, of what is moved itself
        )

    def _move(self, tensor: torch.Tensor, size: float, source: torch.Tensor | None = None) -> None:
        """Move a tensor's values in place, or write a source's moved values to it; whole numbers stay."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            flat = _flat(tensor)
            given = flat if source is None else _flat(source)
            holds = _has_whole(given)
            if holds and source is None:
                given = flat.clone()
            for rows, moved, factors in self._in_rows(given, flat, size):
                torch.mul(rows, factors, out=moved)  # infinity stays, which a sum would not leave
            if holds:
                torch.where(given == given.round(), given, flat, out=flat)
            if flat.data_ptr() != tensor.data_ptr():
                values = torch.view_as_complex(flat.view(-1, 2)) if tensor.is_complex() else flat
                tensor.copy_(values.view(tensor.shape))

    def _in_rows(
        self, given: torch.Tensor, flat: torch.Tensor, size: float
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield values and the place of the moved ones, in rows as long as the pool, with their factors."""
        begin, count = self._places.randrange(_POOL), len(flat)
        factors = self._factors(flat, size)[begin : begin + min(_POOL, count)]
        if count <= _POOL:
            yield given, flat, factors
            return
        whole = count // _POOL * _POOL
        yield given[:whole].view(-1, _POOL), flat[:whole].view(-1, _POOL), factors
        if whole < count:
            yield given[whole:], flat[whole:], factors[: count - whole]

    def _factors(self, flat: torch.Tensor, size: float) -> torch.Tensor:
        """Return the pool of factors twice, so that any place in it is followed by a whole one."""
        key = flat.device, flat.dtype, size
        if key not in self._pools:
            if not self._signs.numel():
                draws = torch.Generator("cpu").manual_seed(abs(self._seed))
                bits = torch.randint(2, (_POOL,), generator=draws, dtype=torch.int8, device="cpu")
                self._signs = (bits * 2 - 1).repeat(2)
            if len(self._pools) == _POOLS:
                self._pools.pop(next(iter(self._pools)))
            up = size * torch.finfo(flat.dtype).eps * (1 if self._seed > 0 else -1)
            self._pools[key] = self._signs.to(torch.float64).mul_(up).add_(1.0).to(flat)
        return self._pools[key]


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return by_shifts(func, args) if shifts(func, args) else call_operator(func, args, kwargs)


def _tag_as(value: torch.Tensor, copy: torch.Tensor) -> None:
    """Put a copy where an emulated device has the value."""
    emulation = current()
    if emulation is not None and emulation.tags.on_device(value):
        emulation.tags.put(copy)


def _has_whole(flat: torch.Tensor) -> bool:
    """Return True if a sample has whole numbers other than zero, which stays without care."""
    looked_at = flat[:: max(1, len(flat) // _LOOKED_AT)]
    whole = looked_at == looked_at.round()
    if not bool(whole.any()):
        return False
    if bool((whole & (looked_at != 0)).any()):
        return True
    looked_at = flat[:: max(1, len(flat) // _MORE)]  # zeros may be those of a mask with few ones
    return bool(((looked_at == looked_at.round()) & (looked_at != 0)).any())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements lie in memory without gaps."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.numel() == last + 1


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values in one dimension: a view in the order of memory, or a copy if there are gaps.

    Real and imaginary parts of complex numbers are values of their own.
    """
    dense = _is_dense(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.reshape(-1).clone()
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _kind(func: Any) -> str:
    """Return "draw", "exact", "sum" or "round" for what an operator does to its results."""
    schema, tags = func._schema, func.tags
    if func.namespace not in ("aten", "prims"):
        return "exact" if "c10d" in func.namespace or schema.is_mutable else "sum"
    name = schema.name.partition("::")[2]
    if name in _DRAWS:
        return "draw"
    if name in _EXACT or torch.Tag.nondeterministic_seeded in tags:
        return "exact"
    if torch.Tag.pointwise in tags or name.startswith(("_foreach_", "_fused_")):
        return "round"
    if torch.Tag.reduction not in tags and not _SUMS.search(name):
        return "exact"
    return "round" if schema.is_mutable else "sum"


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw float64 numbers in float32, complex ones alike."""
    if func._schema.is_mutable:
        tensor: torch.Tensor = args[0]
        if tensor.dtype not in _DRAWN:
            return func(*args, **kwargs)
        draws = torch.empty_like(tensor, dtype=_DRAWN[tensor.dtype])
        func(draws, *args[1:], **kwargs)
        return tensor.copy_(draws)
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    dtype = kwargs.get("dtype") or (tensors[0].dtype if tensors else torch.get_default_dtype())
    if dtype not in _DRAWN:
        return func(*args, **kwargs)
    named = {**kwargs, "dtype": _DRAWN[dtype]} if "rand" in func._schema.name else kwargs
    narrow = tree_map(
        lambda v: v.to(_DRAWN.get(v.dtype, v.dtype)) if isinstance(v, torch.Tensor) else v, args
    )
    result = func(*narrow, **named)
    return result.to(dtype) if result.dtype is _DRAWN[dtype] else result


def _terms(func: Any, args: tuple[Any, ...]) -> int:
    """Return about how many products or values an operator sums."""
    tensors = [one for one in args if isinstance(one, torch.Tensor) and one.numel() > 1]
    if not tensors:
        return 1
    name = func._schema.name.partition("::")[2]
    if _MATRIX.search(name) and len(tensors) > 1:
        return tensors[-2].shape[-1]
    if name.endswith("convolution") and len(tensors) > 1:
        return tensors[1].numel() // tensors[1].shape[0]
    if name == "convolution_backward" and tensors[0].dim() > 1:
        return tensors[0].numel() // tensors[0].shape[1]
    sizes = [one.numel() for one in tensors]
    return max(sizes) // (min(sizes) if len(sizes) > 1 else 1) or 1


def _results(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes: its new results, or the arguments that it changes."""
    schema = func._schema
    if not schema.is_mutable:
        fresh = all(one.alias_info is None for one in schema.returns)
        yield from tensors_among((result,) if fresh else ())
        return
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from tensors_among((value,))


def perturb(root: nn.Module, seed: int, upcast: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Perturb parameters, buffers and the inputs of the first call by one unit in the last place.

    Equal modules are perturbed alike. `upcast` is applied to inputs first.
    """
    mode = Perturbed(seed)
    with torch.no_grad():
        for tensor in (*root.parameters(), *root.buffers()):
            for part in parts_of(tensor):
                part.copy_(mode.moved(part))

    def of_input(value: Any) -> Any:
        return mode.moved(upcast(value)) if isinstance(value, torch.Tensor) else value

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        handle.remove()
        return tree_map(of_input, args), tree_map(of_input, kwargs)

    handle = root.register_forward_pre_hook(before, with_kwargs=True)
