"""Enters a dispatch mode below the active ones, so that all may end in any order.

A recording begins and ends in the middle of the script's own `with` blocks. If our mode were on top, the
end of such a block would pop it in place of the script's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._C import _disabled_torch_dispatch_impl
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

DROPOUT = "dropout_p"
"""The name of a dropout probability in the schemas of attention."""
COMPOSITE = "CompositeImplicitAutograd"
CUSTOM = torch._C.DispatchKey.CompositeExplicitAutograd
_TORCHS_OWN = ("aten", "prim", "prims", "_c10d_functional", "c10d")
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_FLAGS = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)


def fake_mode() -> Any:
    """Return the active fake tensor mode, or None. DTensor uses one to infer shapes."""
    return torch._C._get_dispatch_mode(_FAKE)


def full_name(func: Any) -> str:
    """Return an operator's name with its overload, such as `aten::add.Tensor`."""
    name: str = func.name()
    return name if "." in name else f"{name}.default"


_ATEN = torch.ops.aten
_INTO_ZEROS = (
    _ATEN.scatter.src,
    _ATEN.scatter_add.default,
    _ATEN.masked_scatter.default,
    _ATEN.put.default,
    _ATEN.index_put.default,
    _ATEN.index_add.default,
    _ATEN.index_fill.int_Scalar,
)
_IN_PLACE: dict[Any, bool] = {_ATEN.add.Tensor: False, **dict.fromkeys(_INTO_ZEROS, True)}
"""Operators of backward whose result is in the place of their first argument where no dispatch mode runs.

False: the engine's sums of gradients (`InputBuffer::accumulate`), of which the first is from an earlier node.
True: writes into zeros that the node itself made (`areAnyTensorSubclassLike` in FunctionsManual.cpp).
"""
_OF_FORMULA = dict.fromkeys(
    (_ATEN.sub.Tensor, _ATEN.mul.Tensor), "BinaryCrossEntropyWithLogitsBackward0"
)
"""Operators that one formula alone applies to its own result in place, by its node's name."""


def in_place(func: Any, node: Any) -> bool | None:
    """Return True if a backward node's operator writes to a tensor of that node, False if to one of an
    earlier node, None if it writes to none.
    """
    own = _IN_PLACE.get(func)
    if own is None and func in _OF_FORMULA and node.name() == _OF_FORMULA[func]:
        return True
    # Sums whose graph is made are new tensors.
    return None if own is False and torch.is_grad_enabled() else own


def is_composite(func: Any) -> bool:
    """Return True for a composite operator, which inference mode does not decompose."""
    return isinstance(func, OpOverload) and _has_only(func, COMPOSITE)


def is_custom(func: Any) -> bool:
    """Return True for a custom operator with one kernel for all devices, composed of other operators."""
    own = isinstance(func, OpOverload) and func.namespace not in _TORCHS_OWN
    return own and _has_only(func, CUSTOM.name)


def _has_only(func: Any, key: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return has(func.name(), key) and not has(func.name(), "CPU")


def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operator writes, from its schema."""
    schema = getattr(func, "_schema", None)
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments if schema is not None else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_tensors(
    written: Iterable[tuple[int, str]], args: Any, kwargs: Any
) -> Iterator[torch.Tensor]:
    """Yield the tensors passed for these arguments (see `written_arguments`)."""
    return tensors_among(args[at] if at < len(args) else kwargs.get(name) for at, name in written)


def is_random(func: Any) -> bool:
    """Return True for an operator tagged as random, or one that takes a generator."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    is_tagged = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return is_tagged or any("Generator" in str(argument.type) for argument in arguments)


def position_of(func: Any, name: str) -> int:
    """Return the position of an operator's argument, or -1 if it is absent."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return next((at for at, one in enumerate(arguments) if one.name == name), -1)


def dropout_of(position: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return a call's probability of dropout, an argument at this position; 0 if it has none (-1)."""
    if position < 0:
        return 0.0
    found: float = args[position] if len(args) > position else kwargs.get(DROPOUT, 0.0)
    return found


def is_dry() -> bool:
    """Return True if a mode below all others replaces the operators, as a dry run does."""
    return any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def has_own_dispatch(kind: type) -> bool:
    """Return True if a tensor class overrides `__torch_dispatch__`."""
    own: Any = kind
    return own.__torch_dispatch__ is not _disabled_torch_dispatch_impl


def call_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """Call the operator; one whose kernel calls other operators, under the caller's autocast.

    A dispatch mode turns autocast off, and `aten::_trilinear` would compute in another dtype than without it.
    """
    if not _calls_others(func):
        return func(*args, **kwargs)
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        keys = [key for key, device in _AUTOCAST.items() if torch.is_autocast_enabled(device)]
    exclude: Any = torch._C._dispatch_tls_set_dispatch_key_excluded
    try:
        for key in keys:
            exclude(key, False)
        return func(*args, **kwargs)
    finally:
        for key in keys:
            exclude(key, True)


_AUTOCAST = {torch._C.DispatchKey.AutocastCPU: "cpu", torch._C.DispatchKey.AutocastCUDA: "cuda"}
_COMPOSED = (CUSTOM.name, "CompositeExplicitAutogradNonFunctional")


@functools.cache
def _calls_others(func: Any) -> bool:
    """Return True for a custom operator, or a kernel for all devices, without a kernel for autocast."""
    is_own = isinstance(func, OpOverload) and func.namespace not in _TORCHS_OWN
    if not is_own and (getattr(func, "namespace", "") != "aten" or func.is_view):
        return False
    name = full_name(func).removesuffix(".default")
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
    composed = is_own or (any(map(has, _COMPOSED)) and not has("CPU"))
    return composed and not (has("AutocastCPU") or has("AutocastCUDA"))


def run_parts(func: Any, args: Any, kwargs: Any, nested: Callable[..., Any] = call_operator) -> Any:
    """Run the parts of a composite operator by its C++ kernel, not by a Python decomposition.

    `nested` runs the kernels that composite operators have for nested tensors. In inference mode the parts
    run under the caller's autocast, which is off inside a dispatch mode.
    """
    if any(tensor.is_nested for tensor in tensors_among(args)):
        with torch._C._DisableTorchDispatch():
            return nested(func, args, kwargs)
    caller: Any = contextlib.nullcontext
    if torch.is_inference_mode_enabled():
        caller = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]
    with caller():
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def tensors_among(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples and lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)


def enter_below(mode: TorchDispatchMode) -> None:
    """Enter a mode below all of the script's active modes."""
    above = _popped_until(None)
    mode.__enter__()  # type: ignore[no-untyped-call]
    if above:
        _swap_flags(mode, above[-1])
    _push_back(above)


def leave(mode: TorchDispatchMode) -> None:
    """Exit a mode anywhere in the stack, if it is in it."""
    if not any(one is mode for one in _get_current_dispatch_mode_stack()):
        return
    above = _popped_until(mode)
    if above:
        _swap_flags(mode, above[-1])
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    _push_back(above)


def _popped_until(mode: TorchDispatchMode | None) -> list[TorchDispatchMode]:
    popped: list[TorchDispatchMode] = []
    for one in reversed(_get_current_dispatch_mode_stack()):
        if one is mode or one.is_infra_mode():
            break
        popped.append(_pop_mode())
    return popped


def _push_back(popped: list[TorchDispatchMode]) -> None:
    for mode in reversed(popped):
        _push_mode(mode)


def _swap_flags(mode: TorchDispatchMode, above: TorchDispatchMode) -> None:
    """Swap the flags that two modes restore on exit: each stores torch's state from before it was entered."""
    for name in _FLAGS:
        ours, theirs = getattr(mode, name), getattr(above, name)
        if ours and theirs:
            ours[-1], theirs[-1] = theirs[-1], ours[-1]


_ASKING = ContextVar("asking", default=False)


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Mark the operators inside the block as torchtrim's own queries, not part of the program."""
    token = _ASKING.set(True)
    try:
        yield
    finally:
        _ASKING.reset(token)


def is_asking() -> bool:
    """Return True inside a block of `asking`."""
    return _ASKING.get()
