"""Runs operators dry: results have their shapes and no memory, and what would be written is not.

What follows from numbers that are there, such as a batch's lengths and masks, is computed after all, so
that a program which decides by them goes the way it would. See `dry.bounds` for what it cannot know.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.dispatch.modes import (
    fake_mode,
    has_own_dispatch,
    is_composite,
    run_parts,
    tensors_among,
)
from torchtrim.dispatch.storages import PLAIN
from torchtrim.dryrun.bounds import BOUNDS, UNTOUCHED
from torchtrim.dryrun.collectives import NAMESPACE, collective
from torchtrim.dryrun.guesses import Guesses
from torchtrim.dryrun.meta_tensors import blanks
from torchtrim.dryrun.oracle import Geometry, is_small, made_by, oracle
from torchtrim.dryrun.workspace import workspace
from torchtrim.emulator.device import current as emulated
from torchtrim.errors import Unsupported

_NOT_TOLD = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)


class _Known(NamedTuple):
    """What is known of an operator by its schema.

    `passes`: it touches no element. `written`: arguments that it writes, by their place in `returns`;
    -1 for those that it does not return. `returns`: for each result the argument that it is, else -1.
    """

    passes: bool
    parts: bool
    written: tuple[tuple[int, str], ...]
    returns: tuple[int, ...]
    bound: Any


class Dry(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode. It is below all others: a recorder sees what it would of a run.

    `batch_size` is that of the first loader that batches. `owned_only`: numbers that were there before
    are not changed, as is right for a live model.
    """

    supports_higher_order_operators = True

    def __init__(self, project: str, *, owned_only: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blanks = blanks()
        self.guesses = Guesses(project)
        self.batch_size: int | None = None
        self._oracle = oracle()
        self._owned_only = owned_only
        self._owned = _Marks()
        self._stale = _Marks()
        self._known: dict[int, _Known] = {}
        self._workspace = 0
        self._pid = os.getpid()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: it stays under the script's own modes and the recorder's."""
        return True

    def take_workspace(self) -> int:
        """Bytes that kernels need beside results, the most of the operators since this was last asked."""
        size, self._workspace = self._workspace, 0
        return size

    def need(self, size: int) -> None:
        """Say what the operator that runs now needs beside its results."""
        self._workspace = max(self._workspace, size)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's elements are there, and are what they would be."""
        storage = tensor.untyped_storage()
        return not self.blanks.holds(storage.data_ptr()) and storage not in self._stale

    def blank(self, geometry: Geometry) -> Any:
        """A tensor without memory."""
        return self.blanks.tensor(*geometry)

    def real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operator after all; what it makes is known."""
        result = func(*args, **kwargs)
        for tensor in tensors_among((result,)):
            if type(tensor) in PLAIN and tensor.layout is torch.strided:
                self._owned.add(tensor.untyped_storage())
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self._pid or fake_mode() is not None:
            return func(*args, **kwargs)
        if types and any(map(has_own_dispatch, types)):
            return NotImplemented
        known = self._known.get(id(func)) or self._know(func)
        if known.parts:
            with self:
                return run_parts(func, args, kwargs, _plainly)
        if known.passes:
            return func(*args, **kwargs)
        tensors = [*tensors_among(args), *tensors_among(kwargs.values())]
        if any(map(_is_odd, tensors)):
            return func(*args, **kwargs)
        every = all(map(self.knows, tensors))
        result = (known.bound or Dry.general)(self, func, args, kwargs, every)
        if emulated() is None:
            self._measure(func, args, kwargs, result)
        return result

    def _measure(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Count a CPU kernel's scratch, or say that it is not counted."""
        size = workspace(func, args, kwargs, result)
        if size is not None:
            self.need(size)
            return
        self.guesses.add(
            f"scratch of {func.name().partition('.')[0]} is not counted: the call is too large to be "
            "tried here, or the program's own profiler runs"
        )

    def general(self, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
        """The results of an operator whose shapes follow from its arguments' shapes.

        `known`: all its tensors are.
        """
        facts = self._known[id(func)]
        geometry = self._asked(func, args, kwargs)
        tensors = [*tensors_among((args, *kwargs.values()))]
        small = known and is_small([*tensors, *made_by(geometry)])
        if small and self._may_touch(facts, tensors, args, kwargs):
            return self.real(func, args, kwargs)
        self._write(facts, args, kwargs)
        return self._made(facts, geometry, args, kwargs)

    def _asked(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return self._oracle.results(func, args, kwargs)
        except _NOT_TOLD:
            raise Unsupported(
                f"nobody knows what {func} gives without running it{self.guesses.where()}: the operator "
                "has no implementation on fake tensors. If it is yours, give it one with "
                "torch.library.register_fake; else measure: torchtrim diagnose."
            ) from None

    def _may_touch(
        self, known: _Known, tensors: list[Any], args: Any, kwargs: dict[str, Any]
    ) -> bool:
        """Whether all that an operator writes is ours to be written.

        BatchNorm writes statistics that its schema does not name, so its likes compute on our own only.
        """
        if not self._owned_only:
            return True
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        concerned = (*_written(known, args, kwargs), *floats)
        return all(tensor.untyped_storage() in self._owned for tensor in concerned)

    def _write(self, known: _Known, args: Any, kwargs: dict[str, Any]) -> None:
        """What would have been written is not known any longer."""
        self.forget(_written(known, args, kwargs))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """The elements of these tensors are not known any longer."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self.blanks.holds(storage.data_ptr()):
                self._stale.add(storage)

    def _made(self, known: _Known, geometry: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The results: an argument where the operator gives one back, else blank tensors."""
        if not known.returns:
            return None
        single = len(known.returns) == 1
        results = [geometry] if single else list(geometry)
        made = [
            self._blank_nest(one)
            if at < 0
            else self._settled(_argument(args, kwargs, known, at), one)
            for at, one in zip(known.returns, results, strict=True)
        ]
        return made[0] if single else tuple(made)

    def _settled(self, tensor: Any, geometry: Any) -> Any:
        """An argument that is a result too, in the size that the operator gives it."""
        if isinstance(geometry, Geometry) and tuple(tensor.shape) != geometry.shape:
            fresh = self.blank(geometry)
            tensor.set_(fresh.untyped_storage(), 0, geometry.shape, geometry.strides)
        return tensor

    def _blank_nest(self, geometry: Any) -> Any:
        if isinstance(geometry, Geometry):
            return self.blank(geometry)
        return (
            [self._blank_nest(one) for one in geometry] if isinstance(geometry, list) else geometry
        )

    def _know(self, func: Any) -> _Known:
        schema = getattr(func, "_schema", None)
        if schema is None:
            raise Unsupported(f"{func} is no operator that can be estimated without running it.")
        written = tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        name = func.name().partition(".")[0]
        known = self._known[id(func)] = _Known(
            name in UNTOUCHED
            or func.namespace == "profiler"
            or (func.is_view and not written)
            or (torch.Tag.inplace_view in func.tags and name != "aten::resize_"),
            is_composite(func),
            written,
            tuple(_alias_of(one, schema.arguments) for one in schema.returns),
            collective if func.namespace == NAMESPACE else BOUNDS.get(name),
        )
        return known


class _Marks:
    """Storages that are marked, while they live."""

    def __init__(self) -> None:
        self._living: dict[int, weakref.ref[Any]] = {}

    def add(self, storage: Any) -> None:
        """Mark a storage."""
        key = storage._cdata
        if key not in self._living:
            self._living[key] = weakref.ref(storage, lambda _: self._living.pop(key, None))

    def __contains__(self, storage: Any) -> bool:
        return storage._cdata in self._living


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _is_odd(tensor: Any) -> bool:
    """Whether a tensor is of a kind that is run and not estimated: sparse, nested, on another device."""
    return (
        type(tensor) not in PLAIN
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_meta
        or tensor.is_quantized
    )


def _alias_of(result: Any, arguments: Any) -> int:
    """Position of the argument that a result is; -1 where it is made."""
    if result.alias_info is None or not result.alias_info.is_write:
        return -1
    names = result.alias_info.before_set
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & names:
            return position
    return -1


def _argument(args: Any, kwargs: dict[str, Any], known: _Known, position: int) -> Any:
    if position < len(args):
        return args[position]
    return kwargs[next(name for at, name in known.written if at == position)]


def _written(known: _Known, args: Any, kwargs: dict[str, Any]) -> Iterable[Any]:
    values = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in known.written
    ]
    return tensors_among(values)
