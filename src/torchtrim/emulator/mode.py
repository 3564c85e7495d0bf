"""Runs every operator on CPU, and says of its results where they would lie."""

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
"""What `x[i] = 3.0` runs from torch 2.15 on. Where `i` is the host's, a GPU moves it there first."""
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
"""Their indices may be the host's, and nothing else."""
_OWN_TARGET = frozenset(("aten::copy_", "aten::_foreach_copy_", "aten::fill_", "aten::bernoulli_"))
_NO_KERNEL = "Could not run '"
_TAKE_INTEGERS = (torch.ops.aten.histc.default,)
"""On a GPU; the CPU computes these for floating point alone."""


class _Known(NamedTuple):
    """The properties of an operator by its name. One that `takes_lists` is judged by the first of each."""

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
    """One emulated CUDA device. `call` runs an operator; the mode does so for those that nobody records.

    An operator is on the device if it says so or one of its tensors does. `target` is where the copy
    that runs now is to go: on the device, to the host, or where it comes from (None). `adopts`: tensors
    of the host that meet some of the device are taken to lie there too. `composites`: operators that are
    made of others differently than on the CPU, and how. `orders`: in which order streams do their work, None
    for at once.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tags = Tags()
        self.moving = _Local()
        self._known: dict[int, _Known] = {}
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
        """True: compiled code runs compiled."""
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
        """What runs the operators that a composite one is made of on this device; None for another."""
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
        """Whether a value that is assigned is one number, and on the device: its gradient is there."""
        value = args[2] if len(args) > 2 else None
        return isinstance(value, torch.Tensor) and not value.dim() and self.tags.on_device(value)

    def _made(self, known: _Known, result: Any) -> tuple[Any, ...]:
        """The results of an operator that are where it ran."""
        if known.own_target:
            return ()
        return result[:1] if known.counts_on_host else (result,)

    def _placed(
        self, known: _Known, on: bool, args: Any, kwargs: dict[str, Any]
    ) -> tuple[bool, dict[str, Any]]:
        """Where the result goes, and the arguments as the CPU takes them."""
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
        """What C++ made on its own, since Python's calls always say whether the memory is pinned."""
        if isinstance(made, torch.Tensor) and not made.is_meta and not self.tags.on_device(made):
            self.tags.leave_open(made)

    def _met(self, known: _Known, values: Iterable[Any], host: list[torch.Tensor]) -> bool:
        """Whether a tensor among the values is on the device. Those that are not are added to `host`."""
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

    def _settle(self, func: Any, known: _Known, args: Any, host: list[torch.Tensor]) -> None:
        """Tensors that a composite operator made belong where it is used; others of the host's do not."""
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

    def _know(self, func: Any) -> _Known:
        name = func.name().partition(".")[0]
        known = self._known[id(func)] = _Known(
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


def _is_indexed(known: _Known, tensor: torch.Tensor, args: Any) -> bool:
    """Whether an operator indexes the tensor, or assigns it, rather than index by it."""
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
