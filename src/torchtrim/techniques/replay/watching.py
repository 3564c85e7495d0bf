"""Watches modules run, records how planned tensors are computed, and gives autograd recipes instead."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _disabled_torch_dispatch_impl
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.executor.failing import note
from torchtrim.executor.ordinals import counting, is_numbered, unnumbered
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Handles
from torchtrim.executor.saved_tensor_hooks import (
    Handed,
    Hooks,
    Lost,
    foreign,
    is_chained,
    on_top,
    own,
)
from torchtrim.executor.swap import Swapped
from torchtrim.records.operator_names import role_of
from torchtrim.techniques.replay.places import ReplayPlace, place_of
from torchtrim.techniques.replay.recipes import (
    NEVER,
    SELF,
    KeptTensor,
    Noise,
    Recipe,
    RecipeStep,
    RecipeView,
    SavedRecipe,
    with_statistics,
    without_writes,
)
from torchtrim.techniques.replay.table import BATCH_NORMS, DRAW, NOISE


def watch(roots: Mapping[str, nn.Module], where: Sequence[str]) -> Handle:
    """Watch the modules of these places. If it raises `ApplyFailed`, the modules are unchanged."""
    places: defaultdict[str, list[ReplayPlace]] = defaultdict(list)
    for place in map(place_of, where):
        places[place.path].append(place)
    watcher = ReplayWatcher(
        {run.name for several in places.values() for p in several for run in p.runs}
    )
    handles = Handles()
    try:
        for path, several in places.items():
            wrap = functools.partial(_watched, watcher, several)
            handles.add(Swapped(module_at(roots, path), wrap))
    except BaseException as error:
        note(error, str(several[0]))
        handles.revert()
        raise
    return handles


def _watched(
    watcher: ReplayWatcher, places: list[ReplayPlace], forward: Callable[..., Any]
) -> Callable[..., Any]:
    named = _by_name(places)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not watcher.may_watch():
            watcher.lost.tell(str(places[0]))
            return forward(*args, **kwargs)
        call = _WatchedCall(named, str(places[0]))
        return watcher.run(call, functools.partial(forward, *args, **kwargs))

    return run


Named = dict[str, dict[int, str]]
"""Places of a module, by operator role and ordinal."""


def _by_name(places: Sequence[ReplayPlace]) -> Named:
    named: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for place in places:
        for run in place.runs:
            named[run.name][run.ordinal] = str(place)
    return dict(named)


class _WatchedCall:
    """A watched module call: how often each operator has run in it, and its records."""

    def __init__(self, named: Named, where: str) -> None:
        self.counts = dict.fromkeys(named, 0)
        self.named = named
        self.where = where
        self.noted: list[int] = []
        self.read: list[int] = []


class _PlannedOperator(NamedTuple):
    """A named operator that is running: its call and its place."""

    call: _WatchedCall
    place: str


class _StorageRecord(NamedTuple):
    """Record of how a storage was computed, with the tensor's dtype and geometry.

    The weak reference keeps the storage's address from being reused.
    """

    recipe: Recipe
    storage: StorageWeakRef
    found: _PlannedOperator
    dtype: torch.dtype
    geometry: tuple[Any, ...]


class _Kind(NamedTuple):
    """An operator's name, its role if plans use it, and the arguments it writes."""

    name: str
    role: str
    writes: tuple[tuple[int, str], ...]


class ReplayWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode of a plan, active while any of its modules runs.

    Records are dropped at the end of their call. After that only autograd's saved tensors hold recipes.
    """

    def __init__(self, roles: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._roles = roles
        self._kinds: dict[Any, _Kind] = {}
        self._calls: list[_WatchedCall] = []
        self._noted: dict[int, _StorageRecord] = {}
        self._readers: dict[int, list[Recipe]] = {}
        self._outer: Hooks | None = None
        self._hooks = self._pack, _unpack
        self.lost = Lost("replay")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that functions compiled by the script stay compiled."""
        return True

    def may_watch(self) -> bool:
        """Return True unless other saved-tensor hooks are active, such as a checkpoint's."""
        return not foreign()

    def run(self, call: _WatchedCall, forward: Callable[[], Any]) -> Any:
        """Run a call while watching it."""
        self._calls.append(call)
        try:
            if len(self._calls) > 1:
                return forward()
            top = on_top()
            self._outer = top if is_chained(top) else None
            with torch.autograd.graph.saved_tensors_hooks(*self._hooks), counting(self._skip), self:
                return forward()
        except Exception as error:
            note(error, call.where)
            raise
        finally:
            self._calls.pop()
            self._forget(call)

    def _skip(self, counts: Counter[str]) -> None:
        """Advance the ordinals for operators that were substituted."""
        for call in self._calls:
            for name in call.counts:
                call.counts[name] += counts[name]

    def _forget(self, call: _WatchedCall) -> None:
        for storage in call.noted:
            self._noted.pop(storage, None)
        for storage in call.read:
            self._readers.pop(storage, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(_is_own, types)):
            return NotImplemented
        kind = self._kinds.get(func) or self._know(func)
        found = self._count(kind.role) if kind.role else None
        if kind.writes:
            return self._write(func, args, kwargs, kind, found)
        if found is None:
            return func(*args, **kwargs)
        if kind.name == NOISE:
            result = func(*args, **kwargs)
            self._note(result, Noise(result, found.place), found)
            return result
        recipe = Recipe(self._step(func, args, kwargs, kind, found), found.place)
        result = func(*args, **kwargs)
        if kind.name in BATCH_NORMS:
            recipe.steps[0] = with_statistics(recipe.steps[0], args, result)
        self._read_by(recipe, recipe.steps[0], found)
        self._note(result, recipe, found)
        return result

    def _know(self, func: Any) -> _Kind:
        namespace, _, name = str(func).partition(".")
        plain = name.partition(".")[0]
        writes = tuple(
            (position, argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        role = role_of(plain)
        planned = namespace == "aten" and role in self._roles
        kind = self._kinds[func] = _Kind(*((plain, role) if planned else ("", "")), writes)
        return kind

    def _count(self, role: str) -> _PlannedOperator | None:
        """Count an operator of a role. Return what the plan says of it, if anything."""
        if torch._C._current_autograd_node() is not None or not is_numbered():
            return None
        found = None
        for call in self._calls:
            if role in call.counts:
                number = call.counts[role]
                call.counts[role] = number + 1
                place = call.named[role].get(number)
                if place is not None and torch.is_grad_enabled():
                    found = _PlannedOperator(call, place)
        return found

    def _step(
        self, func: Any, args: Any, kwargs: Any, kind: _Kind, found: _PlannedOperator
    ) -> RecipeStep:
        """Record what is needed to rerun an operator."""
        if kind.name == DRAW:
            return NEVER
        if kind.name in BATCH_NORMS:
            args = without_writes(args)
        return RecipeStep(func, self._held(args, found), self._held(kwargs, found))

    def _held(self, value: Any, found: _PlannedOperator) -> Any:
        """Replace tensors in arguments by the recipe's references to them."""
        if isinstance(value, torch.Tensor):
            noted = self._of(value)
            if noted is None or noted.found != found:
                return KeptTensor(value)
            self._keep(noted.recipe, value)
            return _part(noted.recipe, value)
        if type(value) in (list, tuple):
            return type(value)(self._held(one, found) for one in value)
        if type(value) is dict:
            return {key: self._held(one, found) for key, one in value.items()}
        return value

    def _keep(self, recipe: Recipe, value: torch.Tensor) -> None:
        """Pack noise before anything is computed from it."""
        if isinstance(recipe, Noise):
            with unnumbered():
                recipe.keep(value)

    def _read_by(self, recipe: Recipe, step: RecipeStep, found: _PlannedOperator) -> None:
        """Make the recipe depend on the tensors that a step keeps."""
        for kept in _kept_among((step.args, step.kwargs)):
            storage = _number(kept.tensor)
            self._readers.setdefault(storage, []).append(recipe)
            found.call.read.append(storage)

    def _note(self, result: Any, recipe: Recipe, found: _PlannedOperator) -> None:
        if foreign():
            self.lost.tell(found.place)
        made = result[0] if isinstance(result, (tuple, list)) else result
        number = _number(made)
        weak = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
        self._noted[number] = _StorageRecord(recipe, weak, found, made.dtype, _geometry(made))
        found.call.noted.append(number)

    def _of(self, tensor: torch.Tensor) -> _StorageRecord | None:
        """Return the record of a tensor's storage, or None."""
        noted = self._noted.get(_number(tensor))
        if noted is not None and isinstance(noted.recipe, Noise) and not noted.recipe.is_drawn:
            return None
        if noted is None or tensor.dtype != noted.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return noted

    def _write(
        self, func: Any, args: Any, kwargs: Any, kind: _Kind, found: _PlannedOperator | None
    ) -> Any:
        """Append an in-place write to the recipe, or invalidate the record."""
        if not self._noted and not self._readers:
            return func(*args, **kwargs)
        written = [
            args[position] if position < len(args) else kwargs.get(name)
            for position, name in kind.writes
        ]
        numbers = [_number(one) for one in _tensors_among(written)]
        for number in numbers:
            for recipe in self._readers.pop(number, ()):
                with unnumbered():
                    recipe.pin()
        noted = self._noted.get(numbers[0]) if found is not None else None
        step = None
        if found is not None and noted is not None and _may_add(noted, found, written):
            step = self._step(func, (SELF, *args[1:]), kwargs, kind, found)
        result = func(*args, **kwargs)
        if step is not None and noted is not None and found is not None:
            noted.recipe.add(step)
            self._read_by(noted.recipe, step, found)
        else:
            for number in numbers:
                self._noted.pop(number, None)
        return result

    def _pack(self, tensor: torch.Tensor) -> Any:
        noted = self._of(tensor) if self._noted and type(tensor) in _PLAIN else None
        if noted is not None:
            self._keep(noted.recipe, tensor)
            return SavedRecipe(_part(noted.recipe, tensor))
        if self._outer is not None:
            pack, unpack = self._outer
            return Handed(unpack, pack(tensor))
        if tensor.grad_fn is None:
            return KeptTensor(tensor)
        with torch._C._DisableTorchDispatch():
            return KeptTensor(tensor.detach())


_PLAIN = (torch.Tensor, nn.Parameter)


@own
def _unpack(saved: SavedRecipe | KeptTensor | Handed) -> torch.Tensor:
    return saved.get()


def _is_own(kind: type) -> bool:
    own: Any = kind
    return own.__torch_dispatch__ is not _disabled_torch_dispatch_impl


def _may_add(noted: _StorageRecord, found: _PlannedOperator, written: list[Any]) -> bool:
    """Return True if a write to an entire tensor belongs to its recipe."""
    return noted.found == found and len(written) == 1 and noted.geometry == _geometry(written[0])


def _number(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _part(recipe: Recipe, tensor: torch.Tensor) -> RecipeView:
    size, stride, offset = _geometry(tensor)
    return RecipeView(recipe, size, stride, offset, len(recipe.steps))


def _kept_among(value: Any) -> Iterator[KeptTensor]:
    if isinstance(value, KeptTensor):
        yield value
    elif type(value) in (list, tuple):
        for one in value:
            yield from _kept_among(one)
    elif type(value) is dict:
        yield from _kept_among(tuple(value.values()))


def _tensors_among(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):
        for one in value:
            yield from _tensors_among(one)
