"""A dispatch mode that runs every operator on the CPU and tags its results with their device."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.dispatch.modes import (
    CUSTOM,
    fake_mode,
    has_own_dispatch,
    is_composite,
    is_custom,
    run_parts,
    tensors_among,
)
from torchtrim.dispatch.storages import PLAIN
from torchtrim.emulator.orders import Orders
from torchtrim.emulator.tags import HOST, Tags
from torchtrim.errors import Unsupported
from torchtrim.syncs.lookup import holds, row

_MEETS_HOST = frozenset(
    (
        "aten::copy_",
        "aten::_to_copy",
        "aten::index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index",
        "aten::_foreach_copy_",
        "aten::_pack_padded_sequence",
        "aten::_pack_padded_sequence_backward",
        "aten::_ctc_loss",
        "aten::_ctc_loss_backward",
        "aten::_fused_adam_",
        "aten::_fused_adamw_",
        "aten::set_",
        "aten::record_stream",
        "aten::fill_",
        "aten::bernoulli_",
        "aten::_resize_output_",
    )
)
_FILLS = frozenset(
    ("aten::index_fill_", "aten::masked_fill_")
    if holds(row("host-index-fill"), str(torch.__version__))
    else ()
)
"""The operator of `x[i] = 3.0` from torch 2.15 on. A GPU first uploads `i` if it is on the host."""
_TAKES_NUMBERS = frozenset(
    ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::masked_fill")
)
_INDEXES = frozenset(
    (
        "aten::index",
        "aten::index_put",
        "aten::index_put_",
        "aten::_index_put_impl_",
        "aten::_unsafe_index",
    )
)
"""Only their indices may be on the host."""
_OWN_TARGET = frozenset(("aten::copy_", "aten::_foreach_copy_", "aten::fill_", "aten::bernoulli_"))
_NO_KERNEL = "Could not run '"
_TAKE_INTEGERS = (torch.ops.aten.histc.default,)
"""On a GPU; the CPU supports only floating point."""


class _OperatorTraits(NamedTuple):
    """Properties of an operator, by its name. `takes_lists`: the first element of each list decides."""

    copies: bool
    meets_host: bool
    own_target: bool
    takes_numbers: bool
    indexes: bool
    fills: bool
    counts_on_host: bool
    takes_lists: bool
    parts: Any


class _Local(threading.local):
    target: bool | None = None


class Accelerator(TorchDispatchMode):
    """An emulated CUDA device. `call` runs an operator; the mode calls it for unrecorded operators.

    An operator runs on the device if its arguments name the device or include a tensor on it. `target` is the
    destination of the current copy: the device, the host, or its source (None). `adopts`: host tensors
    used together with device tensors count as on the device. `composites`: replacements of composite
    operators. `orders`: the order of stream work, or None to run it at once.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tags = Tags()
        self.moving = _Local()
        self._known: dict[int, _OperatorTraits] = {}
        self._pid = os.getpid()
        self._was_on = False
        self.adopts = False
        self.orders: Orders | None = None
        self.composites: dict[Any, Any] = {}
        self._numbers: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that compiled code stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fake_mode() is not None:
            return func(*args, **(kwargs or {}))
        if types and any(map(has_own_dispatch, types)):
            return NotImplemented
        known = self._known.get(id(func)) or self._know(func)
        if known.parts is not None:
            with self:
                return known.parts(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    def parts_of(self, func: Any) -> Any:
        """Return the device's decomposition of a composite operator, or None for other operators."""
        if func in self.composites:
            return self.composites[func]
        if is_custom(func):
            return lambda *args, **kwargs: func._op_dk(CUSTOM, *args, **kwargs)
        if not is_composite(func):
            return None
        return lambda *args, **kwargs: run_parts(func, args, kwargs, self.call)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator and tag its results."""
        if os.getpid() != self._pid:
            return func(*args, **kwargs)
        known = self._known.get(id(func)) or self._know(func)
        host: list[torch.Tensor] = []
        on = self._met(known, args, host)
        if kwargs:
            on = self._met(known, kwargs.values(), host) or on
        if on and host:
            self._settle(func, known, args, host)
        if known.takes_numbers and self._is_number_on_device(args):
            self._numbers.add(_get_sequence_nr() - 1)
        met = on
        if kwargs:
            on, kwargs = self._placed(known, on, args, kwargs)
        elif known.copies and self.moving.target is not None:
            on = self.moving.target
        if self.orders is not None and (met or on):
            result = self.orders.run(self._run, func, args, kwargs, down=met and not on)
        else:
            result = self._run(func, args, kwargs)
        if on:
            self._put(self._made(known, result))
        elif self.tags.any_open() and any(map(self.tags.is_open, tensors_among(args))):
            for made in tensors_among((result,)):
                self.tags.leave_open(made)
        self._was_on = on
        return result

    def _is_number_on_device(self, args: Any) -> bool:
        """True if an assigned value is a single number on the device, so that its gradient is there too."""
        value = args[2] if len(args) > 2 else None
        return isinstance(value, torch.Tensor) and not value.dim() and self.tags.on_device(value)

    def _made(self, known: _OperatorTraits, result: Any) -> tuple[Any, ...]:
        """Tag the results of an operator with the device it ran on."""
        if known.own_target:
            return ()
        return result[:1] if known.counts_on_host else (result,)

    def _placed(
        self, known: _OperatorTraits, on: bool, args: Any, kwargs: dict[str, Any]
    ) -> tuple[bool, dict[str, Any]]:
        """Return the device of the result, and the arguments for the CPU."""
        device = kwargs.get("device")
        if device is not None:
            if device.type == "cuda":
                on, kwargs = True, {**kwargs, "device": HOST}
            elif device.type == "meta":
                on = False
            elif known.copies:
                on = on if self.moving.target is None else self.moving.target
            elif "pin_memory" in kwargs:
                on = False
            elif not on and (node := _current_autograd_node()) is not None:
                number = args and args[0] == []
                on = node._sequence_nr() in self._numbers if number else self._was_on
        if known.copies and self.moving.target is not None:
            on = self.moving.target
        return on, kwargs

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.get("pin_memory")
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            if _NO_KERNEL in str(error):
                raise _missing(func) from error
            if func not in _TAKE_INTEGERS or not self.tags.on_device(args[0]):
                raise
            result = func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        if pinned:
            self.tags.pin(result)
        elif "device" in kwargs and "pin_memory" not in kwargs:
            self._leave_open(result)
        return result

    def _leave_open(self, made: Any) -> None:
        """True for a tensor created by C++ itself: calls from Python always pass `pin_memory`."""
        if isinstance(made, torch.Tensor) and not made.is_meta and not self.tags.on_device(made):
            self.tags.leave_open(made)

    def _met(self, known: _OperatorTraits, values: Iterable[Any], host: list[torch.Tensor]) -> bool:
        """True if a tensor among the values is on the device. Appends the others to `host`."""
        device = self.tags._device
        on = False
        some_open = self.tags.any_open()
        for value in values:
            kind = type(value)
            if kind in PLAIN or isinstance(value, torch.Tensor):
                try:
                    if value.untyped_storage()._cdata in device:
                        on = True
                        continue
                except (NotImplementedError, RuntimeError):
                    if self.tags.on_device(value):
                        on = True
                        continue
                if value.dim() or (some_open and not known.takes_numbers):
                    host.append(value)
            elif kind in (list, tuple):
                first = known.takes_lists and not self.adopts
                on = self._met(known, value[:1] if first else value, host) or on
        return on

    def _settle(
        self, func: Any, known: _OperatorTraits, args: Any, host: list[torch.Tensor]
    ) -> None:
        """Assign open tensors, created by composite operators, to the device. Reject other host tensors."""
        for tensor in host:
            if self.tags.is_open(tensor):
                self.tags.put(tensor)
            elif not tensor.dim() or (known.meets_host and not _is_indexed(known, tensor, args)):
                continue
            elif self.adopts:
                self.tags.put(tensor)
            else:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and cpu! (when checking the arguments of {func.name()}: "
                    f"{_described(tensor)} is on cpu)"
                )

    def _put(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.tags.put(value)
            elif isinstance(value, (list, tuple)):
                self._put(value)

    def _know(self, func: Any) -> _OperatorTraits:
        name = func.name().partition(".")[0]
        known = self._known[id(func)] = _OperatorTraits(
            name == "aten::_to_copy",
            name in _MEETS_HOST or name in _FILLS,
            name in _OWN_TARGET,
            name in _TAKES_NUMBERS,
            name in _INDEXES,
            name in _FILLS,
            name == "aten::_pack_padded_sequence",
            name.startswith(("aten::_foreach_", "aten::_fused_")),
            self.parts_of(func),
        )
        return known


def _is_indexed(known: _OperatorTraits, tensor: torch.Tensor, args: Any) -> bool:
    """True if the operator indexes or assigns the tensor, rather than using it as an index."""
    if known.fills:
        return bool(tensor is args[0])
    return known.indexes and any(tensor is argument for argument in args)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _missing(func: Any) -> Unsupported:
    return Unsupported(
        f"the emulated device cannot run {func.name()}: the operator has no kernel for CPU. "
        "Run the script where there is a GPU, or replace the operator."
    )
