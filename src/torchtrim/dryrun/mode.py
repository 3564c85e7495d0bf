"""Runs operators without computing: results have shapes but no memory.

It does compute values that follow from known numbers, such as a batch's lengths and masks, so a program that
branches on them takes the same path as in a real run. See `dryrun.bounds` for data-dependent results.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

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
    written_arguments,
    written_tensors,
)
from torchtrim.dispatch.places import Places, line_of
from torchtrim.dispatch.storages import PLAIN
from torchtrim.dryrun.bounds import BOUNDS, NAMESPACE, UNTOUCHED, collective
from torchtrim.dryrun.meta_tensors import blanks
from torchtrim.dryrun.oracle import Geometry, geometries_in, is_small, oracle
from torchtrim.dryrun.workspace import workspace
from torchtrim.emulator.device import current as emulated
from torchtrim.errors import Unsupported

_NOT_INFERRED = (
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
    """The dispatch mode of a dry run, below all other modes, so a recorder sees the same operators.

    `batch_size` is the batch size of the first loader, `writes` the number of writes to a storage.
    `owned_only`: do not change data that existed before the dry run, such as a live model's.
    """

    supports_higher_order_operators = True

    def __init__(self, project: str, *, owned_only: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blanks = blanks()
        self.guesses = Guesses(project)
        self.batch_size: int | None = None
        self.writes: Counter[int] = Counter()
        self._oracle = oracle()
        self._owned_only = owned_only
        # The storages that the dry run created, and those with unknown elements, by address.
        self._owned: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._stale: WeakValueDictionary[int, Any] = WeakValueDictionary()
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

    def note_batch_size(self, size: int) -> None:
        """Record the batch size of a loader; the first one counts."""
        self.batch_size = self.batch_size or size

    def need(self, size: int) -> None:
        """Report the scratch bytes of the running operator."""
        self._workspace = max(self._workspace, size)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor's elements are the ones a real run would have."""
        storage = tensor.untyped_storage()
        return not self.blanks.holds(storage.data_ptr()) and storage._cdata not in self._stale

    def blank(self, geometry: Geometry) -> Any:
        """Return a tensor without memory."""
        return self.blanks.tensor(*geometry)

    def real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operator; its results are known from then on."""
        result = func(*args, **kwargs)
        for tensor in tensors_among((result,)):
            if type(tensor) in PLAIN and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._owned[storage._cdata] = storage
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
                return run_parts(func, args, kwargs)
        if known.passes:
            return func(*args, **kwargs)
        tensors = [*tensors_among(args), *tensors_among(kwargs.values())]
        if any(map(_is_odd, tensors)):
            return func(*args, **kwargs)
        every = all(map(self.knows, tensors))
        result = (known.bound or Dry.general)(self, func, args, kwargs, every)
        if emulated() is not None:
            return result
        scratch = workspace(func, args, kwargs, result)
        if scratch is None:
            self.guesses.add(
                f"scratch of {func.name().partition('.')[0]} is not counted: the call is too large to "
                "try here, it raises on zeros, or the program's own profiler is running"
            )
        self.need(scratch or 0)
        return result

    def general(self, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
        """Return the results of an operator whose shapes follow from its arguments' shapes.

        `known`: the elements of all its tensors are known.
        """
        facts = self._known[id(func)]
        try:
            geometry = self._oracle.results(func, args, kwargs)
        except _NOT_INFERRED:
            raise Unsupported(
                f"{func} cannot be estimated without running it{self.guesses.where()}: the operator "
                "has no implementation for fake tensors. If it is yours, add one with "
                "torch.library.register_fake; otherwise measure with torchtrim diagnose."
            ) from None
        tensors = [*tensors_among((args, *kwargs.values()))]
        written = [*written_tensors(facts.written, args, kwargs)]
        if known and is_small([*tensors, *geometries_in(geometry)]):
            # BatchNorm writes statistics that its schema does not declare, so floats count as written.
            floats = [tensor for tensor in tensors if tensor.is_floating_point()]
            owned = (one.untyped_storage()._cdata in self._owned for one in (*written, *floats))
            if not self._owned_only or all(owned):
                return self.real(func, args, kwargs)
        self.forget(written)
        return self._results(facts, geometry, args, kwargs)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the elements of these tensors as unknown."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.writes[storage._cdata] += 1
            if not self.blanks.holds(storage.data_ptr()):
                self._stale[storage._cdata] = storage

    def _results(
        self, known: _OperatorFacts, geometry: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if not known.returns:
            return None
        single = len(known.returns) == 1
        results = []
        for at, one in zip(known.returns, [geometry] if single else geometry, strict=True):
            if at < 0:
                results.append(self._blank_nest(one))
                continue
            names = dict(known.written)
            alias = args[at] if at < len(args) else kwargs[names[at]]
            if isinstance(one, Geometry) and tuple(alias.shape) != one.shape:
                alias.set_(self.blank(one).untyped_storage(), 0, one.shape, one.strides)
            results.append(alias)
        return results[0] if single else tuple(results)

    def _blank_nest(self, geometry: Any) -> Any:
        if isinstance(geometry, Geometry):
            return self.blank(geometry)
        return [*map(self._blank_nest, geometry)] if isinstance(geometry, list) else geometry

    def _know(self, func: Any) -> _OperatorFacts:
        schema = getattr(func, "_schema", None)
        if schema is None:
            raise Unsupported(
                f"{func} cannot be estimated without running it: it is not an operator of torch."
            )
        written = written_arguments(func)
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


def _is_odd(tensor: Any) -> bool:
    """Return True for sparse, nested or quantized tensors and subclasses, whose operators run for real."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return True
    return bool(tensor.is_nested or tensor.is_meta or tensor.is_quantized)


def _alias_of(result: Any, arguments: Any) -> int:
    """Return the position of the argument that a result aliases, or -1."""
    if result.alias_info is None or not result.alias_info.is_write:
        return -1
    names = result.alias_info.before_set
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & names:
            return position
    return -1


class Guess(NamedTuple):
    """A source line that needed an unknown value, and the assumed value."""

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
        """Return a sentence for each guess, the most frequent first."""
        root = f"{Path.cwd()}{os.sep}"
        return tuple(
            f"{guess.path.removeprefix(root)}:{guess.line}: {guess.assumed}"
            for guess, _ in self.found.most_common()
        )

    def _line(self) -> tuple[str, int]:
        spot, caller = self._places.find(sys._getframe(2))
        site = caller or spot
        return ("", 0) if site is None else (site[0].co_filename, line_of(site))
