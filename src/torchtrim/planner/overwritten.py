"""The profile of a step in which operators write their results over their inputs: computed, not run."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from torchtrim.records.profile import Profile, Storage, TensorUse


def overwritten(profile: Profile, operators: Iterable[int]) -> Profile:
    """The profile as it would be; each of these operators has one input and one output, of one geometry."""
    heirs: dict[int, int] = {}
    storages = list(profile.storages)
    changed = list(profile.operators)
    for index in sorted(operators):
        op = changed[index]
        made, kept = op.outputs[0].storage, heirs.get(op.inputs[0].storage, op.inputs[0].storage)
        heirs[made] = kept
        storages[kept] = _joined(storages[kept], storages[made])
        storages[made] = replace(storages[made], bytes=0)
        rise = max(op.transient_bytes - storages[kept].bytes, 0)
        changed[index] = replace(op, mutates=(kept,), transient_bytes=rise)

    def uses(given: tuple[TensorUse, ...]) -> tuple[TensorUse, ...]:
        if not any(use.storage in heirs for use in given):
            return given
        return tuple(replace(use, storage=heirs.get(use.storage, use.storage)) for use in given)

    def numbers(given: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(heirs.get(number, number) for number in given)

    return replace(
        profile,
        storages=storages,
        operators=[
            replace(o, inputs=uses(o.inputs), outputs=uses(o.outputs), mutates=numbers(o.mutates))
            for o in changed
        ],
        calls=[
            replace(call, inputs=numbers(call.inputs), outputs=numbers(call.outputs))
            for call in profile.calls
        ],
    )


def _joined(old: Storage, new: Storage) -> Storage:
    """A storage that holds first the one, then the other."""
    return replace(old, death=new.death, kind=new.kind)
