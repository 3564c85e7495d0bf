"""The settings of a script's run: eager mode, float64 or perturbed tensors, and filled empty ones."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from torchtrim.records.trial import Request
from torchtrim.runner.perturbed import Perturbed, perturb

_OLD_TYPES = (torch, "FloatTensor", "DoubleTensor"), (torch.cuda, "FloatTensor", "DoubleTensor")
_NAMES = {
    f"{module.__name__}.{one}": f"{module.__name__}.{other}" for module, one, other in _OLD_TYPES
}


def widen_old_types() -> None:
    """Have `torch.FloatTensor(2, 3)`, which modes cannot intercept, create float64 tensors from now on."""
    for module, narrow, wide in _OLD_TYPES:
        setattr(module, narrow, getattr(module, wide))


def load_as_written() -> None:
    """Keep the type of tensors read from a file or received from a loader's worker."""
    rebuild = torch._utils._rebuild_tensor

    @functools.wraps(rebuild)
    def as_written(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return rebuild(*args)  # type: ignore[no-untyped-call]

    torch._utils._rebuild_tensor = as_written


def keep_wide_in_backward() -> None:
    """Run recomputation in backward under `Wide` too: torch turns modes off there."""
    run_backward = torch.autograd.graph._engine_run_backward

    @functools.wraps(run_backward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with Wide():
            return run_backward(*args, **kwargs)

    for owner in (torch.autograd, torch.autograd.graph):
        owner._engine_run_backward = wide  # type: ignore[attr-defined]


def prepare(root: nn.Module, request: Request) -> None:
    """Upcast or perturb parameters, buffers and the inputs of the first call, as requested."""
    if request.double:
        root._apply(widened)  # type: ignore[no-untyped-call]
        if request.compiles:
            root.register_forward_pre_hook(_upcast_inputs, with_kwargs=True)
    if request.nudged:
        perturb(root, request.nudged, _upcast if request.double else lambda value: value)


def _upcast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(_upcast, args), tree_map(_upcast, kwargs)


@contextlib.contextmanager
def precision(*, double: bool, nudged: int) -> Iterator[None]:
    """Run in float64, and perturbed by a seed other than 0."""
    with contextlib.ExitStack() as stack:
        if double:
            stack.enter_context(Wide())
        if double or nudged:
            stack.enter_context(Perturbed(nudged, narrow=not double))
        yield


_NARROW = {torch.float32, torch.bfloat16, torch.float16, torch.complex64}
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_METHODS: dict[Any, Any] = {
    getattr(torch.Tensor, narrow): getattr(torch.Tensor, wide)
    for narrow, wide in (("float", "double"), ("cfloat", "cdouble"))
}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of floating-point numbers in float64, one of complex numbers in complex128."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


class Wide(TorchFunctionMode):
    """Mode that replaces each float32 that a program names by float64, and complex64 by complex128.

    As in `x.float()`, `x.type("torch.FloatTensor")`, `softmax(x, -1, dtype=torch.float32)`. It also upcasts
    narrower data that meets float64 in an operator of one type, except in tensors that are written to, as in
    `layer(x.bfloat16())` of a layer in bfloat16, whose parameters are float64 here. The cast itself stays: to
    round to a half type is another function than not to.

    Otherwise the program would round to float32 itself, which hides how much less two runs differ.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args)  # most calls: to read an attribute names no type
        if sys._getframe(1).f_globals.get("__name__") == GradScaler.__module__:
            return func(*args, **(kwargs or {}))  # its kernels take no other scale than float32
        func = _METHODS.get(func, func)
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(_wide, args))
        try:
            return func(*args, **named)
        except RuntimeError:
            values = (*args, *named.values())
            types = {value.dtype for value in values if isinstance(value, torch.Tensor)}
            mixed = not (types.isdisjoint(_WIDE.values()) or types.isdisjoint(_NARROW))
            if not mixed or _writes_narrow(func, args, named):
                raise
        named = {name: _upcast(value) for name, value in named.items()}
        return func(*map(_upcast, args), **named)


def _writes_narrow(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return True if a function writes to a narrow tensor: an upcast copy would lose the write."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return _is_narrow(named.get("out")) or (in_place and _is_narrow(args[0] if args else None))


def _upcast(value: Any) -> Any:
    return widened(value) if _is_narrow(value) else value


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _NARROW


def _wide(value: Any) -> Any:
    if isinstance(value, str):
        return _NAMES.get(value, value)
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


_SEED = 7_081_990  # arbitrary
_SCALE = 0.02  # the usual deviation of initial weights of transformers, so that steps stay finite
_NOTE = (
    "{count} tensors of {root}, first `{first}`, are uninitialized memory of `to_empty`: the script has not "
    "written them before its first forward. Here they are the same small numbers in every run; "
    "without torchtrim they can hold anything. Make `reset_parameters` initialize them"
)


class _Filled(NamedTuple):
    """A tensor filled after `to_empty`, and its versions then."""

    tensor: weakref.ref[torch.Tensor]
    versions: tuple[int, int]


_filled: dict[int, _Filled] = {}


def fill_uninitialized() -> None:
    """Fill the tensors of `to_empty` with small numbers from now on, in this process."""
    original = nn.Module.to_empty

    @functools.wraps(original)
    def to_empty(module: nn.Module, *args: Any, **options: Any) -> Any:
        result = original(module, *args, **options)
        with _disable_current_modes(), torch.no_grad():
            _fill(module)
        return result

    nn.Module.to_empty = to_empty  # type: ignore[assignment, method-assign]


def note_uninitialized(root: nn.Module) -> tuple[str, ...]:
    """Return a note on the tensors that a root has not written before its first forward, if any."""
    names = []
    for name, tensor in _tensors_of(root):
        filled = _filled.get(id(tensor))
        if filled and filled.tensor() is tensor and filled.versions == _versions(tensor):
            names.append(name)
    if not names:
        return ()
    return (_NOTE.format(count=len(names), root=type(root).__name__, first=names[0]),)


def _fill(module: nn.Module) -> None:
    draws = torch.Generator().manual_seed(_SEED)
    for _, tensor in _tensors_of(module):
        own = _own_part(tensor)
        if own.is_floating_point():
            drawn = torch.empty(own.shape, dtype=torch.float32, device="cpu")
            own.copy_(drawn.normal_(0.0, _SCALE, generator=draws))
        else:
            own.zero_()
        _filled[id(tensor)] = _Filled(weakref.ref(tensor), _versions(tensor))


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, _own_part(tensor)._version


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
