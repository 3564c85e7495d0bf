"""Says what a tensor of a step is, in a word: logits, attention scores, a dropout mask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torchtrim.records.operator_names import base_name, role_of, word_of
from torchtrim.records.profile import Operator, Profile
from torchtrim.records.remembered import remembered

_NORMS = frozenset(("batch_norm", "layer_norm", "group_norm", "rms_norm"))
_MATMULS = frozenset(("bmm", "baddbmm", "mm", "addmm"))
_OF_LOGITS = frozenset(("log_softmax", "binary_cross_entropy_with_logits"))
_COPIES = frozenset(("_to_copy", "clone", "copy_"))
_SCALES = _COPIES | {"div", "div_", "mul", "mul_", "add", "add_", "masked_fill", "masked_fill_"}
_MOST_HOPS = 3  # Arbitrary; scores are scaled, masked and cast on their way to softmax.


def what_is(profile: Profile, storage: int) -> str:
    """Return what a computed tensor is, such as `"logits"` or `"output of ReLU"`; empty if there is no word
    for it."""
    birth = profile.storages[storage].birth
    if birth < 0 or profile.storages[storage].kind not in ("activation", "temporary"):
        return ""
    op = profile.operators[birth]
    if op.phase == "backward":
        return "gradient of an activation"
    if op.phase not in ("forward", "recompute"):
        return ""
    role = _role(op)
    first = op.outputs[:1]
    if first and first[0].storage != storage:
        return _secondary(role, op.name) or _of_maker(op, role)
    word = _of_reads(profile, storage, role)
    if not word and op.module < 0 and first and first[0].shape == ():
        return "loss"
    return word or _of_maker(op, role)


def _secondary(role: str, operator: str) -> str:
    """Name an operator's second or later output."""
    if role in _NORMS:
        return f"statistics of {word_of(operator)}"
    return "dropout mask" if role == "dropout" else ""


def _of_reads(profile: Profile, storage: int, role: str) -> str:
    """Name a tensor by the operators that read it."""
    if _reaches(profile, storage, _OF_LOGITS, _COPIES):
        return "logits"
    if role == "softmax":
        read = _reaches(profile, storage, _MATMULS, _COPIES | {"dropout"})
        return "attention weights" if read else "probabilities"
    if role in _MATMULS | _SCALES and _reaches(profile, storage, {"softmax"}, _SCALES):
        return "attention scores"
    return "log-probabilities" if role == "log_softmax" else ""


def _of_maker(op: Operator, role: str) -> str:
    if role in _NORMS:
        return "normalized input"
    word = word_of(op.name)
    return "" if word == base_name(op.name) else f"output of {word}"


def _reaches(
    profile: Profile,
    storage: int,
    readers: frozenset[str] | set[str],
    through: frozenset[str],
    hops: int = _MOST_HOPS,
) -> bool:
    """Return True if one of the operators reads the tensor in forward, directly or through others."""
    for number in _forward_reads(profile).get(storage, ()):
        op = profile.operators[number]
        role = _role(op)
        if role in readers:
            return True
        following = [use.storage for use in op.outputs[:1] if use.storage != storage]
        more = following if hops and role in through else []
        if any(_reaches(profile, one, readers, through, hops - 1) for one in more):
            return True
    return False


@remembered
def _forward_reads(profile: Profile) -> Mapping[int, Sequence[int]]:
    reads: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(profile.operators):
        if op.phase in ("forward", "recompute"):
            for storage in {use.storage for use in op.inputs}:
                reads[storage].append(number)
    return reads


def _role(op: Operator) -> str:
    return role_of(base_name(op.name).removeprefix("aten::"))
