"""Watches modules run, records how planned tensors are computed, and gives autograd recipes instead."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchtrim.dispatch.modes import (
    DROPOUT,
    call_operator,
    dropout_of,
    position_of,
    tensors_among,
)
from torchtrim.executor.ordinals import storage_number, unnumbered
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, all_or_none
from torchtrim.executor.roles import OperatorOrdinal
from torchtrim.executor.saved_tensors import (
    PLAIN,
    OperatorKind,
    Saved,
    SavedTensorWatcher,
    geometry_of,
)
from torchtrim.techniques.replay.places import ReplayPlace, place_of
from torchtrim.techniques.replay.recipes import (
    NEVER,
    SELF,
    AwaitedRecipe,
    KeptTensor,
    Noise,
    Recipe,
    RecipeStep,
    RecipeView,
    recorded_among,
    with_statistics,
    without_writes,
)
from torchtrim.techniques.replay.table import BATCH_NORMS, DRAW, NOISE, may_rerun


def watch(roots: Mapping[str, nn.Module], where: Sequence[str], *, unread: bool = False) -> Handle:
    """Watch the modules of these places. If it raises `ApplyFailed`, the modules are unchanged.

    `unread`: no backward is expected to ask for these results.
    """
    places: defaultdict[str, list[ReplayPlace]] = defaultdict(list)
    for place in map(place_of, where):
        places[place.path].append(place)
    watcher = ReplayWatcher(
        {run.name for several in places.values() for p in several for run in p.runs}, unread=unread
    )
    by_first = {str(several[0]): several for several in places.values()}

    def change(first: str) -> Handle:
        module = module_at(roots, by_first[first][0].path)
        named: defaultdict[str, dict[int, str]] = defaultdict(dict)
        for place in by_first[first]:
            for name, ordinal in place.runs:
                named[name][ordinal] = str(place)
        return watcher.watch(module, first, partial(_WatchedCall, dict(named)))

    return all_or_none(by_first, change)


_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


class _WatchedCall:
    """A watched module call: how often each operator has run in it, and its records.

    `named`: the places of the module, by operator role and ordinal.
    """

    def __init__(self, named: dict[str, dict[int, str]]) -> None:
        self.counts = dict.fromkeys(named, 0)
        self.named = named
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


class ReplayWatcher(SavedTensorWatcher[_WatchedCall]):
    """Watcher of a plan's modules.

    Records are dropped at the end of their call. After that only autograd's saved tensors hold recipes.
    """

    def __init__(self, roles: set[str], *, unread: bool = False) -> None:
        super().__init__("replay", roles, KeptTensor.detached, nests=True)
        self._leave_to_change = Recipe.lose if unread else Recipe.pin
        self._noted: dict[int, _StorageRecord] = {}
        self._readers: dict[int, list[Recipe]] = {}

    def skip(self, counts: Counter[str]) -> None:
        """Advance the ordinals for operators that were substituted."""
        for call in self.calls:
            for name in call.counts:
                call.counts[name] += counts[name]

    def planned(self, call: _WatchedCall) -> Mapping[str, Collection[OperatorOrdinal]]:
        """Return the operators that a call must run, by their places in the plan."""
        places: defaultdict[str, list[OperatorOrdinal]] = defaultdict(list)
        for name, ordinals in call.named.items():
            for ordinal, place in ordinals.items():
                places[place].append(OperatorOrdinal(name, ordinal))
        return places

    def end(self, call: _WatchedCall) -> None:
        """Drop the records of a call that has ended."""
        for storage in call.noted:
            self._noted.pop(storage, None)
        for storage in call.read:
            self._readers.pop(storage, None)

    def operator(self, kind: OperatorKind, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, and record how it computes the results that the plan names."""
        found = self._count(kind.role) if kind.role else None
        if found is not None:
            dropout = dropout_of(position_of(func, DROPOUT), args, kwargs)
            if not may_rerun(kind.name, dropout) or _has_columns(args):
                self.miss(found.place, f"{kind.name} may not rerun")
                found = None
        if kind.writes:
            return self._write(func, args, kwargs, kind, found)
        if found is None:
            return call_operator(func, args, kwargs)
        if kind.name == NOISE:
            result = call_operator(func, args, kwargs)
            self._note(result, Noise(result, found.place), found)
            return result
        recipe = Recipe(self._step(func, args, kwargs, kind, found), found.place)
        result = call_operator(func, args, kwargs)
        if kind.name in BATCH_NORMS:
            recipe.steps[0] = with_statistics(recipe.steps[0], args, result)
        self._read_by(recipe, recipe.steps[0], found)
        self._note(result, recipe, found)
        return result

    def _count(self, role: str) -> _PlannedOperator | None:
        """Count an operator of a role. Return its entry in the plan, if any."""
        found = None
        for call in self.calls:
            if role in call.counts:
                number = call.counts[role]
                call.counts[role] = number + 1
                place = call.named[role].get(number)
                if place is not None:
                    found = _PlannedOperator(call, place)
        return found

    def _step(
        self, func: Any, args: Any, kwargs: Any, kind: OperatorKind, found: _PlannedOperator
    ) -> RecipeStep:
        if kind.name == DRAW:
            return NEVER
        if kind.name in BATCH_NORMS:
            args = without_writes(args)
        return RecipeStep(func, self._held(args, found), self._held(kwargs, found))

    def _held(self, value: Any, found: _PlannedOperator) -> Any:
        """Replace tensors in arguments by the recipe's references to them."""
        if isinstance(value, torch.Tensor):
            noted = self._of(value)
            return self._part(noted, value) if noted and noted.found == found else KeptTensor(value)
        if type(value) in (list, tuple):
            return type(value)(self._held(one, found) for one in value)
        if type(value) is dict:
            return {key: self._held(one, found) for key, one in value.items()}
        return value

    def _part(self, noted: _StorageRecord, value: torch.Tensor) -> RecipeView:
        """Return a view of a recipe's result. Packs noise before anything is computed from it."""
        if isinstance(noted.recipe, Noise):
            with unnumbered():
                noted.recipe.keep(value)
        return RecipeView(noted.recipe, *geometry_of(value), len(noted.recipe.steps))

    def _read_by(self, recipe: Recipe, step: RecipeStep, found: _PlannedOperator) -> None:
        """Make the recipe depend on the tensors that a step keeps."""
        for kept in recorded_among((step.args, step.kwargs)):
            if isinstance(kept, KeptTensor):
                storage = storage_number(kept.tensor)
                self._readers.setdefault(storage, []).append(recipe)
                found.call.read.append(storage)

    def _note(self, result: Any, recipe: Recipe, found: _PlannedOperator) -> None:
        self.warn_if_foreign(found.place)
        tensor = result[0] if isinstance(result, (tuple, list)) else result
        number = storage_number(tensor)
        weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        geometry = geometry_of(tensor)
        self._noted[number] = _StorageRecord(recipe, weak, found, tensor.dtype, geometry)
        found.call.noted.append(number)

    def _of(self, tensor: torch.Tensor) -> _StorageRecord | None:
        """Return the record of a tensor's storage, or None."""
        noted = self._noted.get(storage_number(tensor))
        if noted is None or tensor.dtype != noted.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        is_pending = isinstance(noted.recipe, Noise) and not noted.recipe.is_drawn
        return None if is_pending else noted

    def _write(
        self, func: Any, args: Any, kwargs: Any, kind: OperatorKind, found: _PlannedOperator | None
    ) -> Any:
        """Append an in-place write to the recipe, or invalidate the record."""
        if not self._noted and not self._readers:
            return call_operator(func, args, kwargs)
        written = kind.written(args, kwargs)
        numbers = [storage_number(tensor) for tensor in tensors_among(written)]
        for number in numbers:
            for recipe in self._readers.pop(number, ()):
                with unnumbered():
                    self._leave_to_change(recipe)
        noted = self._noted.get(numbers[0]) if found is not None else None
        if found is not None and noted is not None and _may_add(noted, found, written):
            step = self._step(func, (SELF, *args[1:]), kwargs, kind, found)
            result = call_operator(func, args, kwargs)
            noted.recipe.add(step)
            self._read_by(noted.recipe, step, found)
            return result
        result = call_operator(func, args, kwargs)
        for number in numbers:
            self._noted.pop(number, None)
        return result

    def pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        """Return the recipe of a saved tensor, or keep the tensor."""
        noted = self._of(tensor) if self._noted and type(tensor) in PLAIN else None
        return AwaitedRecipe(self._part(noted, tensor)) if noted is not None else self.keep(tensor)


def _has_columns(args: Any) -> bool:
    """Return True if one is sparse by columns: a rerun of its product raises its version."""
    return any(tensor.layout in _COLUMNS for tensor in tensors_among(args))


def _may_add(noted: _StorageRecord, found: _PlannedOperator, written: list[Any]) -> bool:
    return noted.found == found and len(written) == 1 and noted.geometry == geometry_of(written[0])
