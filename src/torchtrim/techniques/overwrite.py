"""Overwrite: an activation module writes its result over its input, in training too.

Only where the input is dead the moment the result is there: nothing but the module's own backward, which can
do with the result, reads it again, and no name holds it. It is OptNet's `inplace`
(https://github.com/fmassa/optimize-net), decided by what a step was seen to do. Of PyTorch's modules with an
`inplace`, ReLU6, Hardtanh and Threshold keep a copy for backward, and ELU and its kin round otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Call, Operator, Profile
from torchtrim.step.edits import Edit
from torchtrim.step.step import Span, Step
from torchtrim.techniques.base import Handle, Option, Plain
from torchtrim.techniques.overwriting import TYPES, overwrite_places

if TYPE_CHECKING:
    from torch import nn

_COMPUTED = ("activation", "temporary")


class Overwrite:
    """`where` holds the paths of activation modules."""

    name = "overwrite"
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Every activation module all of whose calls find their input dead."""
        if step.profile is None:
            return []
        reader = _Reader(step.profile)
        return [
            Option(self.name, module.path, calls)
            for number, module in enumerate(step.modules)
            if module.type in TYPES and (calls := reader.overwriting(number))
        ]

    def edits(self, step: Step, option: Option) -> Edit:
        """The first operator of each call writes over its input."""
        return Edit(overwrites=tuple(span.first for span in option.spans))

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Set `inplace` on the named modules. Raises `ApplyFailed`, the model as it was."""
        return overwrite_places(roots, technique.where)

    def export(self) -> Plain:
        """What sets `inplace` by itself."""
        return Plain("torchtrim.techniques.overwriting", "overwrite_places")


TECHNIQUE = Overwrite()


class _Reader:
    """Reads which operators find their input dead."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._calls: defaultdict[int, list[Call]] = defaultdict(list)
        self._hooked: set[int] = set()
        self._readers: defaultdict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(profile.operators):
            for use in op.inputs:
                self._readers[use.storage].append(index)
        for call in profile.calls:
            self._calls[call.module].append(call)
            if profile.modules[call.module].hooked:
                self._hooked.update((*call.inputs, *call.outputs))

    def overwriting(self, module: int) -> tuple[Span, ...]:
        """The module's calls, if each may overwrite its input; else ()."""
        calls = self._calls[module]
        may = not self._profile.modules[module].hooked and all(map(self._may_overwrite, calls))
        return tuple(Span(call.first, call.last) for call in calls) if may else ()

    def _may_overwrite(self, call: Call) -> bool:
        """Whether its operator's result has the geometry of the input, which is dead then."""
        operators, storages = self._profile.operators, self._profile.storages
        op = operators[call.first]
        if call.last == call.first or len(op.inputs) != 1 or len(op.outputs) != 1 or op.mutates:
            return False
        (read,), (made,) = op.inputs, op.outputs
        if any(
            _storages(other) != {made.storage} for other in operators[call.first + 1 : call.last]
        ):
            return False
        old, new = storages[read.storage], storages[made.storage]
        alike = (read.dtype, read.shape, read.strides) == (made.dtype, made.shape, made.strides)
        computed = old.birth >= 0 and old.kind in _COMPUTED and read.storage not in self._hooked
        return alike and computed and old.bytes == new.bytes and self._is_dead(read.storage, call)

    def _is_dead(self, storage: int, call: Call) -> bool:
        """Whether after the call only its own backward reads the storage, and lets go of it last."""
        after = [reader for reader in self._readers[storage] if reader >= call.last]
        own = all(self._profile.operators[reader].forward == call.first for reader in after)
        end = max(after) + 1 if after else call.last
        return own and self._profile.storages[storage].death <= end


def _storages(op: Operator) -> set[int]:
    """What it reads and makes; a detached result is one more view of it."""
    return {use.storage for use in (*op.inputs, *op.outputs)} | set(op.mutates)
