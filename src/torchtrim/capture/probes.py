"""Looks at the values of expressions in user code when they run.

A probed expression is wrapped, in the parsed tree, in a call that looks at its value and gives it back.
Lines stay what they are. No value of a tensor is kept, and none is read but the share of a boolean one
that is true, which neither the recorder nor the emulated device sees.
"""

from __future__ import annotations

import ast
import builtins
import threading
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.records.seen import Execution, Observed, Probe, Seen, Spot

LOOK = "__torchtrim_look__"
_MOST_EXECUTIONS = 500
_MOST_TEXT = 200


class _Pending:
    """The values of an execution that is not over."""

    def __init__(self) -> None:
        self.values: dict[str, Seen] = {}
        self.storages: list[int] = []
        self.grad = torch.is_grad_enabled()


class Probes:
    """The probes of one run. Between `install` and `remove`, instrumented code tells it what it sees."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        self._probes = tuple(probes)
        self._keys = [(one.number, name) for one in self._probes for name in one.parts]
        self._kept: dict[int, dict[bytes, Execution]] = {one.number: {} for one in self._probes}
        self._capped: set[int] = set()
        self._local = threading.local()
        self._threads: list[dict[int, _Pending]] = []
        self._lock = threading.Lock()

    def install(self) -> None:
        """Make the call known to all code of this process."""
        setattr(builtins, LOOK, self._look)

    def remove(self) -> None:
        """Take it back."""
        if hasattr(builtins, LOOK):
            delattr(builtins, LOOK)

    def instrument(self, path: str, tree: ast.Module) -> ast.Module:
        """The tree of a file, with the expressions wrapped that are probed in it."""
        spots: dict[Spot, list[int]] = {}
        numbers = {key: number for number, key in enumerate(self._keys)}
        for probe in self._probes:
            if probe.path == path:
                for name, spot in probe.parts.items():
                    spots.setdefault(spot, []).append(numbers[probe.number, name])
        return ast.fix_missing_locations(_Wrapper(spots).visit(tree)) if spots else tree

    def observed(self) -> tuple[Observed, ...]:
        """What was seen, for each probe."""
        for pending in self._threads:
            for number in list(pending):
                self._close(number, pending.pop(number))
        return tuple(
            Observed(
                number=one.number,
                executions=tuple(self._kept[one.number].values()),
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
        if not hasattr(self._local, "pending"):
            self._local.pending = {}
            with self._lock:
                self._threads.append(self._local.pending)
        found: dict[int, _Pending] = self._local.pending
        return found

    def _close(self, number: int, pending: _Pending) -> None:
        """Keep an execution, counted with those that are like it."""
        found = Execution(values=pending.values, grad=pending.grad)
        key = msgspec.json.encode(found, order="sorted")
        with self._lock:
            kept = self._kept[number]
            if key in kept:
                kept[key] = msgspec.structs.replace(kept[key], count=kept[key].count + 1)
            elif len(kept) < _MOST_EXECUTIONS:
                kept[key] = found
            else:
                self._capped.add(number)


class _Wrapper(ast.NodeTransformer):
    def __init__(self, spots: dict[Spot, list[int]]) -> None:
        self._spots = spots

    def visit(self, node: ast.AST) -> Any:
        found: Any = self.generic_visit(node)
        if not isinstance(node, ast.expr) or not isinstance(
            getattr(node, "ctx", ast.Load()), ast.Load
        ):
            return found
        spot = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        for key in self._spots.get(spot, ()):  # type: ignore[arg-type]
            look = ast.Name(LOOK, ast.Load())
            found = ast.copy_location(ast.Call(look, [ast.Constant(key), found], []), node)
        return found


def _seen(value: Any, storages: list[int]) -> Seen:
    if not isinstance(value, torch.Tensor):
        return _plain(value)
    return Seen(
        kind="tensor",
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(value.device),
        shape=tuple(int(size) for size in value.shape),
        requires_grad=value.requires_grad,
        leaf=value.is_leaf,
        storage=_storage(value, storages),
        share=_share(value),
    )


def _plain(value: Any) -> Seen:
    kind = type(value).__name__
    if isinstance(value, bool | int | float | str | type(None)):
        return Seen(kind=kind, value=repr(value)[:_MOST_TEXT])
    shape = (len(value),) if isinstance(value, list | tuple) else ()
    return Seen(kind=kind, shape=shape)


def _storage(tensor: torch.Tensor, storages: list[int]) -> int:
    try:
        address = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -1
    if address not in storages:
        storages.append(address)
    return storages.index(address)


def _share(tensor: torch.Tensor) -> float | None:
    """The share of a boolean tensor that is true, to two digits."""
    if tensor.dtype != torch.bool or tensor.layout != torch.strided or not tensor.numel():
        return None
    if tensor.device.type == "meta":
        return None
    return round(float(tensor.sum()) / tensor.numel(), 2)
