"""Overwrite: an activation module writes its result over its input, in training too.

Applies only where the input is dead as soon as the result exists: only the module's own backward reads it
again, which can use the result instead, and no variable holds it. This is OptNet's `inplace`
(https://github.com/fmassa/optimize-net), based on recorded lifetimes.

PyTorch's ReLU6 and Hardtanh save their input for backward, or a copy of it if they run in place. The result
serves as well, since it is within the bounds exactly where the input is, so these modules overwrite without a
copy. Threshold would work too, but is rare. SiLU, Mish and Hardswish need their input, and ELU and its
relatives round differently.

`nn.Linear` returns a view for three-dimensional inputs, and autograd's backward of an in-place write to a
view copies the gradient twice. Writing to an alias of the view avoids both copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchtrim.executor.registry import Handle, Option, Plain, Roots, TechniqueUnit
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Operator, Profile, TensorUse
from torchtrim.step.edits import Edit
from torchtrim.step.index import recorded_index
from torchtrim.step.step import Span, Step, StepCall

_CLAMPS = frozenset(("ReLU6", "Hardtanh"))
TYPES = frozenset(("ReLU", "LeakyReLU")) | _CLAMPS
_COMPUTED = ("activation", "temporary")


class Overwrite(TechniqueUnit):
    """`where` holds the paths of activation modules."""

    name = "overwrite"
    does = "write results over inputs"
    equivalence = "BITWISE"
    assumes = ("nothing else holds overwritten inputs",)
    unseen = ("no extension reads an overwritten input by its address",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return every activation module whose input is dead after each of its calls."""
        if step.profile is None:
            return []
        inputs = _DeadInputs(step.profile)
        return [
            Option(self.name, module.path, calls)
            for number, module in enumerate(step.modules)
            if module.type in TYPES and (calls := inputs.overwriting(number))
        ]

    def edits(self, step: Step, option: Option) -> Edit:
        """Overwrite the input in the first operator of each call."""
        return Edit(overwrites=tuple(span.first for span in option.spans))

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Let the named modules overwrite their inputs. On `ApplyFailed` the model is unchanged."""
        from torchtrim.techniques.overwrite.running import overwrite_places

        return overwrite_places(roots, technique.where)

    def export(self) -> Plain:
        """Return the function that applies the technique in exported code."""
        return Plain("torchtrim.techniques.overwrite.running", "overwrite_places")


TECHNIQUE = Overwrite()


class _DeadInputs:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._index = recorded_index(profile)

    def overwriting(self, module: int) -> tuple[Span, ...]:
        calls = self._index.calls[module]
        may = not self._profile.modules[module].hooked and all(map(self._may_overwrite, calls))
        return tuple(call.span for call in calls) if may else ()

    def _may_overwrite(self, call: StepCall) -> bool:
        """Return True if the result, or the copy that the operator saves, may share the input's memory."""
        first, last = call.span
        if last == first:
            return False
        op, *others = self._profile.operators[first:last]
        if len(op.inputs) != 1 or len(op.outputs) != 1 or op.mutates:
            return False
        (read,), (made,) = op.inputs, op.outputs
        if not self._is_alike(read, made) or not self._is_computed(read.storage):
            return False
        if self._profile.modules[call.module].type not in _CLAMPS:
            return _touch(others, made.storage) and self._is_dead(read.storage, call)
        kept, saved = made.storage, read.storage
        if op.name.startswith("aten::clone"):
            kept, saved = saved, kept
        later = self._profile.operators[last : self._left(saved, call)]
        settled = all(kept not in op.mutates for op in later)
        return settled and _touch(others, kept) and self._is_dead(saved, call)

    def _is_alike(self, read: TensorUse, made: TensorUse) -> bool:
        old, new = self._profile.storages[read.storage], self._profile.storages[made.storage]
        alike = (read.dtype, read.shape, read.strides) == (made.dtype, made.shape, made.strides)
        return alike and old.bytes == new.bytes

    def _is_computed(self, storage: int) -> bool:
        one = self._profile.storages[storage]
        computed = one.birth >= 0 and one.kind in _COMPUTED
        return computed and storage not in self._index.hooked_tensors

    def _left(self, storage: int, call: StepCall) -> int:
        readers = self._index.readers.get(storage, ())
        return max((reader + 1 for reader in readers), default=call.span.last)

    def _is_dead(self, storage: int, call: StepCall) -> bool:
        """Return True if, after the call, only its own backward reads the storage, and releases it last."""
        first, last = call.span
        after = [reader for reader in self._index.readers.get(storage, ()) if reader >= last]
        own = all(self._profile.operators[reader].forward == first for reader in after)
        end = max(self._left(storage, call), last)
        return own and self._profile.storages[storage].death <= end


def _touch(others: Iterable[Operator], storage: int) -> bool:
    """Return True if the operators touch no other storage. A detached result is another view of it."""
    return all(
        {use.storage for use in (*op.inputs, *op.outputs)} | set(op.mutates) == {storage}
        for op in others
    )
