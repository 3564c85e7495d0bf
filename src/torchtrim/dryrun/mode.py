"""Runs operators without computing: results have shapes but no memory, and nothing is written.

Values that follow from known numbers, such as a batch's lengths and masks, are computed, so a program that
branches on them takes the same path as in a real run. See `dryrun.bounds` for data-dependent results.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
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
from torchtrim.dispatch.places import Places, line_of
from torchtrim.dispatch.storages import PLAIN
from torchtrim.dryrun.bounds import BOUNDS, NAMESPACE, UNTOUCHED, collective
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


class _OperatorFacts(NamedTuple):
    """Facts about an operator from its schema.

    `passes`: it touches no element. `written`: position and name of each argument it writes.
    `returns`: for each result the position of the argument it aliases, or -1.
    """

    passes: bool
    parts: bool
    written: tuple[tuple[int, str], ...]
    returns: tuple[int, ...]
    bound: Any


class Dry(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode of a dry run. It is below all other modes, so a recorder sees the same operators.

    `batch_size` is the batch size of the first loader. `owned_only`: do not change data that existed before
    the dry run, such as a live model's.
    """

    supports_higher_order_operators = True

    def __init__(self, project: str, *, owned_only: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blanks = blanks()
        self.guesses = Guesses(project)
        self.batch_size: int | None = None
        self._oracle = oracle()
        self._owned_only = owned_only
        self._owned = _StorageSet()
        self._stale = _StorageSet()
        self._known: dict[int, _OperatorFacts] = {}
        self._workspace = 0
        self._pid = os.getpid()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: the mode stays below the script's own modes and the recorder's."""
        return True

    def take_workspace(self) -> int:
        """Return the largest scratch of the operators since the last call, in bytes."""
        size, self._workspace = self._workspace, 0
        return size

    def need(self, size: int) -> None:
        """Report the scratch bytes of the running operator."""
        self._workspace = max(self._workspace, size)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's elements are the ones a real run would have."""
        storage = tensor.untyped_storage()
        return not self.blanks.holds(storage.data_ptr()) and storage not in self._stale

    def blank(self, geometry: Geometry) -> Any:
        """Return a tensor without memory."""
        return self.blanks.tensor(*geometry)

    def real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operator; its results are known from then on."""
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
        """Count a CPU kernel's scratch, or note that it is not counted."""
        size = workspace(func, args, kwargs, result)
        if size is not None:
            self.need(size)
            return
        self.guesses.add(
            f"scratch of {func.name().partition('.')[0]} is not counted: the call is too large to try "
            "here, it raises on zeros, or the program's own profiler is running"
        )

    def general(self, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
        """Return the results of an operator whose shapes follow from its arguments' shapes.

        `known`: the elements of all its tensors are known.
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
                f"{func} cannot be estimated without running it{self.guesses.where()}: the operator "
                "has no implementation for fake tensors. If it is yours, add one with "
                "torch.library.register_fake; otherwise measure with torchtrim diagnose."
            ) from None

    def _may_touch(
        self, known: _OperatorFacts, tensors: list[Any], args: Any, kwargs: dict[str, Any]
    ) -> bool:
        """Return True if the operator may write all its arguments.

        BatchNorm writes statistics that its schema does not declare, so float arguments count as written.
        """
        if not self._owned_only:
            return True
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        concerned = (*_written(known, args, kwargs), *floats)
        return all(tensor.untyped_storage() in self._owned for tensor in concerned)

    def _write(self, known: _OperatorFacts, args: Any, kwargs: dict[str, Any]) -> None:
        self.forget(_written(known, args, kwargs))

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the elements of these tensors as unknown."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not self.blanks.holds(storage.data_ptr()):
                self._stale.add(storage)

    def _made(self, known: _OperatorFacts, geometry: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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
        """Return an argument that is also a result, resized as the operator would."""
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

    def _know(self, func: Any) -> _OperatorFacts:
        schema = getattr(func, "_schema", None)
        if schema is None:
            raise Unsupported(
                f"{func} is not an operator that can be estimated without running it."
            )
        written = tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        name = func.name().partition(".")[0]
        known = self._known[id(func)] = _OperatorFacts(
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


class _StorageSet:
    """A weak set of storages."""

    def __init__(self) -> None:
        self._living: dict[int, weakref.ref[Any]] = {}

    def add(self, storage: Any) -> None:
        """Add a storage."""
        key = storage._cdata
        if key not in self._living:
            self._living[key] = weakref.ref(storage, lambda _: self._living.pop(key, None))

    def __contains__(self, storage: Any) -> bool:
        return storage._cdata in self._living


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _is_odd(tensor: Any) -> bool:
    """Return True for tensors that are computed, not estimated: sparse, nested, quantized or subclasses."""
    return (
        type(tensor) not in PLAIN
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_meta
        or tensor.is_quantized
    )


def _alias_of(result: Any, arguments: Any) -> int:
    """Return the position of the argument that a result aliases, or -1."""
    if result.alias_info is None or not result.alias_info.is_write:
        return -1
    names = result.alias_info.before_set
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & names:
            return position
    return -1


def _argument(args: Any, kwargs: dict[str, Any], known: _OperatorFacts, position: int) -> Any:
    if position < len(args):
        return args[position]
    return kwargs[next(name for at, name in known.written if at == position)]


def _written(known: _OperatorFacts, args: Any, kwargs: dict[str, Any]) -> Iterable[Any]:
    values = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in known.written
    ]
    return tensors_among(values)


class Guess(NamedTuple):
    """A source line that needed an unknown value, and the value assumed there."""

    path: str
    line: int
    assumed: str


class Guesses:
    """Assumptions about unknown values, counted by source line."""

    def __init__(self, project: str) -> None:
        self._places = Places(project)
        self.found: Counter[Guess] = Counter()

    def add(self, assumed: str) -> None:
        """Record an assumption at the running source line."""
        path, line = self._line()
        self.found[Guess(path, line, assumed)] += 1

    def where(self) -> str:
        """Return ` at FILE:LINE` of the running line, empty if it belongs to torch."""
        path, line = self._line()
        return f" at {path}:{line}" if path else ""

    def notes(self) -> tuple[str, ...]:
        """A sentence for each guess, the most frequent first."""
        return tuple(
            f"{_short(guess.path)}:{guess.line}: {guess.assumed}"
            for guess, _ in self.found.most_common()
        )

    def _line(self) -> tuple[str, int]:
        spot, caller = self._places.find(sys._getframe(2))
        found = caller or spot
        return ("", 0) if found is None else (found[0].co_filename, line_of(found))


def _short(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if path and Path(path).is_relative_to(here) else path
