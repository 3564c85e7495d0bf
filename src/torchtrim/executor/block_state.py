"""The state that a block reads and writes, apart from its arguments: saved, and restored for a rerun.

The state consists of buffers, tensors and plain attributes of the block's modules, the random number
generators that its code reaches, and torch's settings. A rerun starts from the state of the first run and
leaves the current state unchanged. Writes are checked in every first run, since statistics may start after a
warm-up. A copy-on-write clone of each buffer costs under a microsecond and detects writes that no version
counter sees, such as those of BatchNorm's kernels.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.capture.code.contents import contents
from torchtrim.capture.code.hooks import (
    are_all_hooked,
    backward_hooks_on_all,
    hooks_of,
    is_ours,
)
from torchtrim.capture.code.live import UNKNOWN
from torchtrim.capture.code.outside import OuterValue, set_item
from torchtrim.capture.code.side_effects import CalledFunction, SideEffects
from torchtrim.capture.recording import tensors_in
from torchtrim.capture.snapshot import OF_TORCH, generator_state, set_state
from torchtrim.errors import ApplyFailed
from torchtrim.executor.notices import say_once
from torchtrim.executor.ordinals import unnumbered
from torchtrim.executor.structure import Structure
from torchtrim.executor.torch_settings import torch_settings, under

_ATOMS = frozenset((bool, int, float, str, type(None), types.FunctionType, object))
_TENSORLESS = _ATOMS | {tuple, list, dict, set, OrderedDict}
"""Types of most module attributes. Comparing with a set is faster than `isinstance`."""


class Key(NamedTuple):
    """Location of a tensor: index of the block's module, table (`_buffers` or `__dict__`) and name."""

    module: int
    table: str
    name: str


class BlockState:
    """The state of a block: some modules and all their submodules, or functions.

    Raises `ApplyFailed` if its code writes something that cannot be restored, such as a file. `takes_back`: a
    rerun takes off the lists what it appends to them, where the code does nothing else with these.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        where: str,
        functions: Sequence[CalledFunction] = (),
        *,
        takes_back: bool = False,
    ) -> None:
        self.where = where
        self._takes_back = takes_back
        self._outer = tuple(modules)
        self._functions = tuple(functions)
        self.written: dict[tuple[bool, ...], set[Key]] = {}
        self._look()
        if self._writes:
            raise ApplyFailed(
                f"`{where}` cannot run a second time: {self._writes[0]}, and a rerun would repeat "
                "that. Remove it from the plan; `replay` reruns single operators without this code."
            )

    @property
    def mode(self) -> tuple[bool, ...]:
        """The `training` flag of each module, which decides what the block writes."""
        return tuple(module.training for module in self.modules)

    def why_once(self, *, same: bool = False) -> str:
        """Return why the block must run only once now, or an empty string if it can be rerun.

        Analyzes its code again if modules, hooks or methods changed since the last call. `same`: another run
        is given the same arguments, so hooks on the forward of all modules may run again, if they have no
        side effects.
        """
        if not self.structure.is_current():
            self._look()
        if backward_hooks_on_all() if same else are_all_hooked():
            return "all modules have hooks, which would be called twice"
        if any(not is_ours(hook) for module in self._hooked for hook in hooks_of(module)):
            return "it has hooks, which would be called twice"
        return str(self._writes[0]) if self._writes else ""

    def begin(self, *, tensors: bool = True, generators: Sequence[Any] = ()) -> Before:
        """Save the state before a first run. Without `tensors`, save only attributes and generators.

        `generators`: those among the arguments of the run.
        """
        return Before(self, tensors=tensors, generators=generators)

    def says_once(self, why: str) -> None:
        """Print once that the block runs without the plan from now on, and why."""
        say_once(
            self.where,
            f"{why}, so it runs without the plan from now on, and the plan's saving there is lost.",
        )

    def _look(self) -> None:
        inner = dict.fromkeys(one for module in self._outer for one in module.modules())
        self._effects = SideEffects(inner, self._functions)
        self.modules: Sequence[nn.Module] = self._effects.modules
        self._writes = self._effects.lasting if self._takes_back else self._effects.writes
        self.grown = self._effects.grown if self._takes_back else []
        self.owned = frozenset(map(id, self.modules))
        self.generators = _drawn_from(self._effects)
        self.reads, self.reads_all = self._effects.reads, self._effects.is_unread
        own = {
            id(table)
            for one in self.modules
            for table in (vars(one), one._parameters, one._buffers)
        }
        self.places = [(one, one.owner in own) for one in self._effects.outside.values()]
        self.structure = Structure(self.modules, self._effects.references)
        self._hooked = [module for module in self.modules if any(hooks_of(module))]

    def outside(self) -> list[tuple[OuterValue, Any]]:
        """Return the places outside of the modules that the code reads, with their values now."""
        now = [(place, place.read(), is_own) for place, is_own in self.places]
        roots = [(place.name, value) for place, value, _ in now]
        inner = contents(roots, None if self.reads_all else self.reads)
        others = [(place, value) for place, value, is_own in now if not is_own]
        every = [*others, *inner]
        if not self.grown:
            return every
        grown = {id(one) for one in self.grown}
        return [one for one in every if grown.isdisjoint((one[0].owner, id(one[1])))]

    def may_read(self, name: str) -> bool:
        """Return True if a run may read what the last one left in an attribute of this name."""
        return self.reads_all or name in self.reads

    def tensors(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield the buffers of the modules and the tensors among their attributes."""
        for number, module in enumerate(self.modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield Key(number, "_buffers", name), buffer
            attributes = vars(module)
            if _TENSORLESS.issuperset(map(type, attributes.values())):
                continue
            for name, value in attributes.items():
                if isinstance(value, torch.Tensor):
                    yield Key(number, "__dict__", name), value

    def parameters(self) -> Iterator[Held]:
        """Yield the parameters with their versions.

        An embedding with `max_norm` writes to its own, which a rerun repeats without effect, so its version
        is None.
        """
        for module in self.modules:
            if not (table := module._parameters):
                continue
            own = getattr(type(module), "max_norm", None)
            counts = vars(module).get("max_norm", own) is None
            for name, one in table.items():
                if one is not None:
                    version = version_of(one) if counts else None
                    yield Held(table, name, one, version, one.requires_grad)


class Held(NamedTuple):
    """A tensor in a module's table, with its version then, or None if writes do not matter.

    `trains`: whether a parameter required gradients.
    """

    table: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int | None
    trains: bool | None = None


def _held_outside(values: Iterable[tuple[OuterValue, Any]]) -> Iterator[Held]:
    for place, value in values:
        if not place.is_read or type(value) in _ATOMS:
            continue
        for one in tensors_in(value):
            yield Held({place.name: one}, place.name, one, version_of(one))


@contextlib.contextmanager
def _training(held: Iterable[Held]) -> Iterator[None]:
    """Have parameters require gradients as they did."""
    others = [one for one in held if one.trains is not None]
    others = [one for one in others if one.tensor.requires_grad is not one.trains]
    for one in others:
        one.tensor.requires_grad_(bool(one.trains))
    try:
        yield
    finally:
        for one in others:
            one.tensor.requires_grad_(not one.trains)


def _written_among(held: Iterable[Held]) -> str:
    for one in held:
        if one.version is not None and version_of(one.tensor) != one.version:
            return one.name
    return ""


class Before:
    """A block's state before a first run, which `again` restores."""

    def __init__(self, state: BlockState, *, tensors: bool, generators: Sequence[Any] = ()) -> None:
        self._state = state
        self._modules, self._structure = state.modules, state.structure
        self._mode = state.mode
        now = dict(state.tensors())
        written = state.written.get(self._mode, ())
        self.tensors: dict[Key, torch.Tensor] = {}
        if now and tensors:  # Copies take no memory until the block writes to one.
            with _not_counted():
                self.tensors = {
                    key: tensor.clone() if key in written else _copy_on_write(tensor)
                    for key, tensor in now.items()
                }
        self._names = frozenset(now)
        self._outside = state.outside()
        self._grown = [(one, len(one)) for one in state.grown]
        self._held = [*state.parameters(), *_held_outside(self._outside)]
        self._storages: list[int] = []
        self._new: list[Key] = []
        self._replaced: dict[Key, torch.Tensor] = {}
        self._objects = [vars(module).copy() for module in self._modules]
        self._versions = {key: (tensor, version_of(tensor)) for key, tensor in now.items()}
        every = (*state.generators, *generators)
        self._generators = [(one, generator_state(one)) for one in every]
        self._settings = torch_settings()
        # Recurrent layers of torch read their weights from a list.
        lists = [vars(module).get("_flat_weights") for module in self._modules]
        self._weights = [(one, list(one)) for one in lists if isinstance(one, list)]

    def _table(self, key: Key) -> dict[str, Any]:
        """The table that holds a tensor, in the modules that ran: the block's may have changed."""
        table: dict[str, Any] = getattr(self._modules[key.module], key.table)
        return table

    def has_run(self) -> tuple[list[str], list[Any]]:
        """End the first run: drop unchanged state. Return the names of the tensors that it wrote, and the
        generators that it drew from.

        Raises `ApplyFailed` if it wrote to a parameter, whose previous values are lost.
        """
        if written := _written_among(self._held):
            raise self._stop(f"it writes to its parameter `{written}` while it runs")
        state, now = self._state, dict(self._state.tensors())
        wrote: set[Key] = set()
        drawn: list[Any] = []
        if self.tensors or self._generators:
            with _not_counted():
                wrote = {key for key in self.tensors if self._is_written(key)}
                drawn = [
                    one
                    for one in self._generators
                    if not _same_state(one[1], generator_state(one[0]))
                ]
        state.written.setdefault(self._mode, set()).update(wrote)
        others = {key for key, (then, _) in self._versions.items() if now.get(key) is not then}
        unread = {key for key in others if self._is_unread(key)}
        self._held += [
            Held(self._table(key), key.name, *self._versions[key])
            for key in self.tensors.keys() - wrote - unread
        ]
        self._replaced = {key: self._versions[key][0] for key in others - wrote - unread}
        self._storages = [_storage_of(one.tensor) for one in self._held]
        self._new = [key for key in now.keys() - self._names if key.table == "_buffers"]
        self.tensors = {key: self._copied(key) for key in wrote}
        self._generators, self._versions = drawn, {}
        self._outside = [(one, _filled(then, one.read())) for one, then in self._outside]
        self._forget_attributes()
        return sorted({key.name for key in wrote | others}), [one for one, _ in drawn]

    def restore(self) -> None:
        """Restore the state before the first run."""
        for key in [key for key, _ in self._state.tensors() if key not in self._names]:
            del self._table(key)[key.name]
        with _not_counted():
            for key, value in self.tensors.items():
                self._table(key)[key.name] = self._put_back(key, value)
        _put_attributes(self._modules, self._objects)
        for key, tensor in self._replaced.items():
            self._table(key)[key.name] = tensor
        for one, was in self._generators:
            set_state(one, was)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Rerun with the state before the first run, and restore the current state afterwards.

        Raises `ApplyFailed` if a tensor that the block reads was written in between.
        """
        if written := _written_among(self._held) or self._moved():
            raise self._stop(f"its `{written}` was written to between its forward and its backward")
        attributes = [vars(module).copy() for module in self._modules]
        tensors = {key: self._table(key).get(key.name) for key in (*self.tensors, *self._new)}
        swapped = [one for one in self._held if one.table.get(one.name) is not one.tensor]
        others = [one.table.get(one.name, UNKNOWN) for one in swapped]
        generators = [(one, generator_state(one)) for one, _ in self._generators]
        outside = [(one, one.read()) for one, _ in self._outside]
        _put_outside(self._outside)
        _put_attributes(self._modules, self._objects)
        with _not_counted() if self.tensors else contextlib.nullcontext():
            for key, value in self.tensors.items():
                self._table(key)[key.name] = value.clone()
        for key in self._new:
            del self._table(key)[key.name]
        for held in swapped:
            held.table[held.name] = held.tensor
        for one, was in self._generators:
            set_state(one, was)
        try:
            with self._surroundings():
                yield
        finally:
            for one, now in generators:
                set_state(one, now)
            for held, other in zip(swapped, others, strict=True):
                set_item(held.table, held.name, other)
            for key, tensor in tensors.items():
                self._table(key)[key.name] = tensor
            _put_attributes(self._modules, attributes)
            _put_outside(outside)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Restore the modules' structure, which parameters train, torch's settings, and lists."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._structure.again())
            stack.enter_context(_training(self._held))
            stack.enter_context(under(self._settings))
            for weights, then in self._weights:
                _fill(stack, weights, 0, then)
            for one, length in self._grown:
                _fill(stack, one, min(length, len(one)), ())
            yield

    def _moved(self) -> str:
        """Return the name of a tensor whose memory was replaced, as by `.data = ...`, which counts as no
        write."""
        pairs = zip(self._held, self._storages, strict=False)
        return next((one.name for one, then in pairs if _storage_of(one.tensor) != then), "")

    def _is_written(self, key: Key) -> bool:
        then, version = self._versions[key]
        if key in self._state.written.get(self._mode, ()) or version_of(then) != version:
            return True
        return not (_shares(then) or _are_equal(then, self.tensors[key]))

    def _copied(self, key: Key) -> torch.Tensor:
        """Return the previous values in a separate tensor, on the device that the program sees."""
        before, then = self.tensors[key], self._versions[key][0]
        if not _shares(before) or then.shape != before.shape:
            return before
        with _not_counted():
            copied = then.clone()
        with _raw():
            return copied.copy_(before)

    def _put_back(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        """Restore the values of a tensor, in place where possible."""
        there = self._objects[key.module].get(key.name) if key.table == "__dict__" else None
        there = self._table(key).get(key.name) if there is None else there
        if isinstance(there, torch.Tensor) and there.shape == value.shape:
            return there.copy_(value)
        return value.clone()

    def _stop(self, reason: str) -> ApplyFailed:
        return ApplyFailed(
            f"`{self._state.where}`: {reason}, so a rerun would compute something else. The run stops before "
            "that. Remove this place from the plan, or plan again."
        )

    def _is_unread(self, key: Key) -> bool:
        return key.table == "__dict__" and not self._state.may_read(key.name)

    def _forget_attributes(self) -> None:
        """Drop tensors that the first run replaced, unless the block reads them."""
        for module, before in zip(self._modules, self._objects, strict=True):
            if not _same_objects(before, now := vars(module)):
                for name, value in before.items():
                    is_replaced = isinstance(value, torch.Tensor) and value is not now.get(name)
                    if is_replaced and not self._state.may_read(name):
                        before[name] = now.get(name)


def _fill(stack: contextlib.ExitStack, one: list[Any], first: int, items: Sequence[Any]) -> None:
    """Replace the items of a list from an index on until the stack unwinds."""
    stack.callback(one.__setitem__, slice(first, None), one[first:])
    one[first:] = items


def _filled(then: Any, now: Any) -> Any:
    """Return the value before a run, with what the run filled: a cache is filled where it is empty, once."""
    if then is None or then is now:
        return now
    return now | then if isinstance(then, dict) and isinstance(now, dict) else then


def _same_objects(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before.values(), now.values()))


def _put_attributes(modules: Iterable[nn.Module], attributes: Iterable[dict[str, Any]]) -> None:
    for module, before in zip(modules, attributes, strict=True):
        if not _same_objects(before, now := vars(module)):
            for name in [name for name in now if name not in before and name not in OF_TORCH]:
                del now[name]
            now.update((name, one) for name, one in before.items() if name not in OF_TORCH)


def _put_outside(values: Iterable[tuple[OuterValue, Any]]) -> None:
    for place, value in values:
        if not place.same(value, place.read()):
            place.write(value)


@contextlib.contextmanager
def _not_counted() -> Iterator[None]:
    with unnumbered(), torch.no_grad():
        yield


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Run operators unseen by the emulated device and the recorder."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    with contextlib.suppress(RuntimeError), _raw():
        return torch.equal(one, other)
    return False


def _shares(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is a copy-on-write clone that has not been written to."""
    return tensor.layout is torch.strided and torch._C._is_cow_tensor(tensor)  # type: ignore[attr-defined]


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter, or 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


_WITH_STORAGE = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))


def _storage_of(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage; a subclass may have none, or one of torch.func that
    outlived its transform.
    """
    if type(tensor) in _WITH_STORAGE and tensor.layout is torch.strided:
        with contextlib.suppress(NotImplementedError):
            return int(tensor.untyped_storage()._cdata)
    return 0


def _copy_on_write(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy-on-write clone, or a plain one if the allocator does not own the memory."""
    if type(tensor) in (torch.Tensor, nn.Buffer):
        with contextlib.suppress(RuntimeError), _raw():
            return torch._lazy_clone(tensor.detach())
    return tensor.clone()


def _drawn_from(effects: SideEffects) -> list[Any]:
    """Generators that a block may draw from, except torch's default ones, which the checkpoint handles.

    Code without readable source may also draw from the global generators of `random` and numpy.
    """
    generators = list(effects.generators)
    if effects.is_unread:
        generators.append(random.getstate.__self__)  # type: ignore[attr-defined]
        if (numpy := sys.modules.get("numpy.random")) is not None:
            generators.append(numpy.get_state.__self__)
    return [one for one in generators if one is not torch.default_generator]


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_state(one[key], other[key]) for key in one)
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
