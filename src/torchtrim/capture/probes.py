"""Probes the values of expressions in running user code, and runs files with replaced text.

A call that inspects a value and returns it wraps each probed expression in the parsed tree; line numbers and
files do not change. Probes keep no tensor and read only boolean ones, for the share of true elements, unseen
by the recorder and the emulated device.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import linecache
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.capture.saved import type_name
from torchtrim.records.probes import Execution, ObservedValue, Probe, ProbeResult, SourceSpan

LOOK = "__torchtrim_look__"
_MOST_EXECUTIONS = 500
"""Arbitrary: distinct executions kept for each run, far more than a fix needs as evidence."""
_MOST_TEXT = 200
"""Characters. Arbitrary: longer strings are data, not modes or names."""


class _Pending:
    def __init__(self) -> None:
        self.values: dict[str, ObservedValue] = {}
        self.storages: list[int] = []
        self.grad = torch.is_grad_enabled()


class Probes:
    """The probes of one run. Between `install` and `remove`, instrumented code reports its values."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        self._probes = tuple(probes)
        self._keys = [(one.number, name) for one in self._probes for name in one.parts]
        self._known: dict[int, dict[bytes, Execution]] = {one.number: {} for one in self._probes}
        self._capped: set[int] = set()
        self._local = threading.local()
        self._threads: list[dict[int, _Pending]] = []
        self._lock = threading.Lock()

    def install(self) -> None:
        """Make the probing function a builtin."""
        setattr(builtins, LOOK, self._look)

    def remove(self) -> None:
        """Remove it from the builtins."""
        if hasattr(builtins, LOOK):
            delattr(builtins, LOOK)

    def instrument(self, path: str, tree: ast.Module) -> ast.Module:
        """Return the tree of a file with its probed expressions wrapped."""
        spots: dict[SourceSpan, list[int]] = {}
        numbers = {key: number for number, key in enumerate(self._keys)}
        for probe in self._probes:
            if probe.path == path:
                for name, spot in probe.parts.items():
                    spots.setdefault(spot, []).append(numbers[probe.number, name])
        return ast.fix_missing_locations(_Wrapper(spots).visit(tree)) if spots else tree

    def observed(self) -> tuple[ProbeResult, ...]:
        """Return the observations of each probe."""
        for pending in self._threads:
            for number in list(pending):
                self._close(number, pending.pop(number))
        return tuple(
            ProbeResult(
                number=one.number,
                executions=tuple(self._known[one.number].values()),
                capped=one.number in self._capped,
            )
            for one in self._probes
        )

    def _look(self, key: int, value: Any) -> Any:
        number, name = self._keys[key]
        pending = self._of_thread()
        current = pending.setdefault(number, _Pending())
        if name in current.values:
            self._close(number, current)
            current = pending[number] = _Pending()
        with _disable_current_modes():
            current.values[name] = _seen(value, current.storages)
        return value

    def _of_thread(self) -> dict[int, _Pending]:
        pending: dict[int, _Pending] | None = getattr(self._local, "pending", None)
        if pending is None:
            pending = self._local.pending = {}
            with self._lock:
                self._threads.append(pending)
        return pending

    def _close(self, number: int, pending: _Pending) -> None:
        """Record an execution; equal ones share a record with a count."""
        execution = Execution(values=pending.values, grad=pending.grad)
        key = msgspec.json.encode(execution, order="sorted")
        with self._lock:
            known = self._known[number]
            if key in known:
                known[key] = msgspec.structs.replace(known[key], count=known[key].count + 1)
            elif len(known) < _MOST_EXECUTIONS:
                known[key] = execution
            else:
                self._capped.add(number)


class _Wrapper(ast.NodeTransformer):
    def __init__(self, spots: dict[SourceSpan, list[int]]) -> None:
        self._spots = spots

    def visit(self, node: ast.AST) -> Any:
        wrapped: Any = self.generic_visit(node)
        is_load = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if not is_load or not isinstance(node, ast.expr):
            return wrapped
        last = node.end_lineno or 0, node.end_col_offset or 0
        for key in self._spots.get((node.lineno, node.col_offset, *last), ()):
            look = ast.Name(LOOK, ast.Load())
            wrapped = ast.copy_location(ast.Call(look, [ast.Constant(key), wrapped], []), node)
        return wrapped


def _seen(value: Any, storages: list[int]) -> ObservedValue:
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        if isinstance(value, bool | int | float | str | type(None)):
            return ObservedValue(kind=kind, value=repr(value)[:_MOST_TEXT])
        shape = (len(value),) if isinstance(value, list | tuple) else ()
        return ObservedValue(kind=kind, shape=shape)
    return ObservedValue(
        kind="tensor",
        dtype=type_name(value.dtype),
        device=str(value.device),
        shape=tuple(int(size) for size in value.shape),
        requires_grad=value.requires_grad,
        leaf=value.is_leaf,
        storage=_storage(value, storages),
        share=_share(value),
    )


def _storage(tensor: torch.Tensor, storages: list[int]) -> int:
    try:
        address = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -1
    if address not in storages:
        storages.append(address)
    return storages.index(address)


def _share(tensor: torch.Tensor) -> float | None:
    """Return the share of true elements of a boolean tensor, to two digits."""
    plain = tensor.layout == torch.strided and tensor.device.type != "meta"
    if tensor.dtype != torch.bool or not plain or not tensor.numel():
        return None
    return round(float(tensor.sum()) / tensor.numel(), 2)


def run_alone(module: ast.Module, names: Mapping[str, object]) -> dict[str, object]:
    """Run functions of the script as a module of their own, with some names given; return all its names."""
    space = dict(names)
    exec(compile(module, "<alone>", "exec"), space)
    return space


class Sources:
    """Replaced texts of files, by absolute path, and the probes of a run."""

    def __init__(self, texts: Mapping[str, str], probes: Probes, probed: Sequence[str]) -> None:
        self._texts = dict(texts)
        self._probes = probes
        self._files = {*texts, *probed}

    def install(self) -> None:
        """Install the import hook."""
        for path, text in self._texts.items():
            linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        if self._files:
            sys.meta_path.insert(0, _ProbeFinder(self))
            self._probes.install()

    def covers(self, path: str) -> bool:
        """Return True if the file has a replaced text or probes."""
        return path in self._files

    def code(self, path: str) -> CodeType:
        """Compile the file, with its replaced text and probes."""
        text = self._texts.get(path)
        tree = ast.parse(Path(path).read_bytes() if text is None else text, filename=path)
        return compile(self._probes.instrument(path, tree), path, "exec", dont_inherit=True)

    def run(self, path: str) -> None:
        """Run a file as `__main__`, as `python` would."""
        module = ModuleType("__main__")
        module.__file__ = path
        module.__dict__["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = module
        exec(self.code(path), module.__dict__)


class _ProbeFinder(importlib.abc.MetaPathFinder):
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        origin = str(Path(spec.origin).resolve())
        if not self._sources.covers(origin):
            return None
        spec.loader = _Loader(fullname, origin, self._sources)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, sources: Sources) -> None:
        super().__init__(fullname, path)
        self._sources = sources

    def get_code(self, fullname: str) -> Any:
        return self._sources.code(self.path)
