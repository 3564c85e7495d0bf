"""A dispatch mode that runs every operator on the CPU and tags its results with their device."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.dispatch.modes import (
    CUSTOM,
    fake_mode,
    has_own_dispatch,
    in_place,
    is_composite,
    is_custom,
    run_parts,
    tensors_among,
)
from torchtrim.dispatch.places import ENGINE
from torchtrim.dispatch.storages import PLAIN
from torchtrim.emulator.orders import Orders
from torchtrim.emulator.tags import HOST, Tags
from torchtrim.emulator.workspaces import PRODUCTS, Workspaces
from torchtrim.errors import Unsupported
from torchtrim.syncs.lookup import holds, row

_OURS = str(Path(__file__).parent.parent)


def _aten(*names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names)


_PUTS = _aten("index_put", "index_put_", "_index_put_impl_")
_INDEXES = _PUTS | _aten("index", "_unsafe_index")  # Only their indices may be on the host.
_TAKES_NUMBERS = _PUTS | _aten("masked_fill")
_OWN_TARGET = _aten("copy_", "_foreach_copy_", "fill_", "bernoulli_")
_MEETS_HOST = (
    _INDEXES
    | _OWN_TARGET
    | _aten("_to_copy", "set_", "record_stream", "_resize_output_", "_fused_adam_", "_fused_adamw_")
    | _aten("_pack_padded_sequence", "_pack_padded_sequence_backward")
    | _aten("_ctc_loss", "_ctc_loss_backward")
)
# The operator of `x[i] = 3.0` from torch 2.15 on. A GPU first uploads `i` if it is on the host.
_FILLS = _aten("index_fill_", "masked_fill_")
if not holds(row("host-index-fill"), str(torch.__version__)):
    _FILLS = frozenset()
# How many of the first results are on the device. Others are host tensors: batch sizes, or the seed
# and offset of dropout (`transformers/cuda/attention.cu`, `_efficient_attention_forward`).
_KEPT_ON_DEVICE: dict[str, Callable[[Any], int]] = {
    "aten::_pack_padded_sequence": lambda args: 1,
    "aten::_scaled_dot_product_efficient_attention": lambda args: 2 if any(args[5:6]) else 4,
}
_TAKE_INTEGERS = (torch.ops.aten.histc.default,)  # On a GPU; the CPU takes only floating point.


class _OperatorTraits(NamedTuple):
    """Properties of an operator. `takes_lists`: the first element of each list decides its device."""

    copies: bool
    meets_host: bool
    own_target: bool
    takes_numbers: bool
    indexes: bool
    fills: bool
    kept_on_device: Callable[[Any], int] | None
    multiplies: bool
    takes_lists: bool
    parts: Any


class _CopyTarget(threading.local):
    target: bool | None = None


class Accelerator(TorchDispatchMode):
    """An emulated CUDA device. `call` runs an operator; the mode calls it for unrecorded operators.

    An operator runs on the device if its arguments name the device or include a tensor on it.
    `moving.target`: the destination of the current copy: the device, the host, or its source (None).
    `adopts`: host tensors used together with device tensors count as on the device. `composites`:
    replacements of composite operators. `workspaces`: those of cuBLAS. `orders`: the order of stream work, or
    None to run it at once.
    """

    supports_higher_order_operators = True

    def __init__(self, workspaces: Workspaces) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tags = Tags()
        self.moving = _CopyTarget()
        self._known: dict[int, _OperatorTraits] = {}
        self._pid = os.getpid()
        self._was_on = False
        self.adopts = False
        self.orders: Orders | None = None
        self.composites: dict[Any, Any] = {}
        self.workspaces = workspaces
        self._numbers: set[int] = set()
        self._node: tuple[int, int] = (-1, 0)

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
        self._see_node()
        host: list[torch.Tensor] = []
        on = self._met(known, args, host)
        if kwargs:
            on = self._met(known, kwargs.values(), host) or on
        if on and host:
            self._settle(func, known, args, host)
        if known.takes_numbers and self._is_number_on_device(args):
            self._numbers.add(_get_sequence_nr() - 1)  # its gradient is on the device too
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
            if not known.own_target:
                kept = known.kept_on_device
                for made in tensors_among(result[: kept(args)] if kept else (result,)):
                    self.tags.put(made)
            if known.multiplies:
                self.tags.hold(self.workspaces.product(args[0]))
            if self._is_in_place(func, args):
                self.tags.may_replace(result, args[0])
        elif self.tags.any_open() and any(map(self.tags.is_open, tensors_among(args))):
            for made in tensors_among((result,)):
                self.tags.leave_open(made)
        self._was_on = on
        return result

    def _see_node(self) -> None:
        """Note the allocations until the running backward node began."""
        node = _current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if number != self._node[0]:
            self._node = number, self.tags.made

    def _is_in_place(self, func: Any, args: Any) -> bool:
        """Return True if C++ code of backward would run an operator in place of its first argument."""
        number, began = self._node
        if number < 0 or (own := in_place(func, _current_autograd_node())) is None:
            return False
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        by_engine = frame is not None and frame.f_code is ENGINE
        return by_engine and own is (self.tags.number(args[0]) >= began)

    def _is_number_on_device(self, args: Any) -> bool:
        value = args[2] if len(args) > 2 else None
        return isinstance(value, torch.Tensor) and not value.dim() and self.tags.on_device(value)

    def _placed(
        self, known: _OperatorTraits, on: bool, args: Any, kwargs: dict[str, Any]
    ) -> tuple[bool, dict[str, Any]]:
        """Return the device of the result, and the arguments for the CPU."""
        if (device := kwargs.get("device")) is not None:
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
        if pinned := kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            if "Could not run '" in str(error):
                raise Unsupported(
                    f"the emulated device cannot run {func.name()}: the operator has no kernel for "
                    "CPU. Run the script where there is a GPU, or replace the operator."
                ) from error
            if func not in _TAKE_INTEGERS or not self.tags.on_device(args[0]):
                raise
            result = func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        if pinned:
            self.tags.pin(result)
        from_cpp = "device" in kwargs and "pin_memory" not in kwargs
        new = from_cpp and isinstance(result, torch.Tensor) and not result.is_meta
        if new and not self.tags.on_device(result):
            self.tags.leave_open(result)
        return result

    def _met(self, known: _OperatorTraits, values: Iterable[Any], host: list[torch.Tensor]) -> bool:
        """Return True if a tensor among the values is on the device. Append the others to `host`."""
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
                kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"cuda:0 and cpu! (when checking the arguments of {func.name()}: {kind} is on cpu)"
                )

    def _know(self, func: Any) -> _OperatorTraits:
        name = func.name().partition(".")[0]
        known = self._known[id(func)] = _OperatorTraits(
            name == "aten::_to_copy",
            name in _MEETS_HOST or name in _FILLS,
            name in _OWN_TARGET,
            name in _TAKES_NUMBERS,
            name in _INDEXES,
            name in _FILLS,
            _KEPT_ON_DEVICE.get(name),
            name in PRODUCTS,
            name.startswith(("aten::_foreach_", "aten::_fused_")),
            self.parts_of(func),
        )
        return known


def _is_indexed(known: _OperatorTraits, tensor: torch.Tensor, args: Any) -> bool:
    """Return True if the operator indexes or assigns the tensor, rather than using it as an index."""
    if known.fills:
        return bool(tensor is args[0])
    return known.indexes and any(tensor is argument for argument in args)
