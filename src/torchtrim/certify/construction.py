"""Differences in how two programs are built, which are not differences of their numbers: names, calls,
settings computed otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace

from torchtrim.certify.compare import name_of
from torchtrim.records.trial import Trial

_INITIAL = "initial state:"
_SETTING_ROUNDS = 1e-13
"""Relative difference of a setting that is rounding: of a rate multiplied a hundred times, or raised to a
power."""


def renamed(one: Trial, other: Trial) -> tuple[Trial, dict[str, str], str]:
    """Return the other program's trial with the original's names, its own label for each that changed, and
    the quantities with other names.

    Parameters and buffers are matched in order, if their first values are equal throughout.
    """
    names = _names(one, other)
    own: dict[str, str] = {}
    steps = []
    for number, step in enumerate(other.steps if names else ()):
        digests = {}
        for name, value in step.digests.items():
            new = _translated(name, names)
            if new in digests:
                return other, {}, ""
            digests[new] = value
            if new != name:
                own[f"{number}/{new}"] = f"{number}/{name}"
        for theirs, mine in _roots(names).items():
            if f"call:{theirs}" in digests:
                digests.setdefault(f"call:{mine}", digests.pop(f"call:{theirs}"))
        steps.append(replace(step, digests=digests))
    if not own:
        return other, {}, ""
    theirs, mine = next(iter(names.items()))
    return replace(other, steps=steps), own, f"{mine} is {theirs} in the other"


def _names(one: Trial, other: Trial) -> dict[str, str]:
    """Return the original's name for each path of the other that differs, longer ones first."""
    sides = [
        [(name.removeprefix(_INITIAL), value) for name, value in _initial(trial)]
        for trial in (one, other)
    ]
    if [value for _, value in sides[0]] != [value for _, value in sides[1]]:
        return {}
    found: dict[str, str] = {}
    for (mine, _), (theirs, _) in zip(*sides, strict=True):
        own, path = _apart(mine.split("."), theirs.split("."))
        if path and found.setdefault(path, own) != own:
            return {}
    return dict(sorted(found.items(), key=lambda pair: -len(pair[0])))


def _initial(trial: Trial) -> Iterator[tuple[str, str]]:
    for step in trial.steps:
        yield from (pair for pair in step.digests.items() if pair[0].startswith(_INITIAL))


def _apart(mine: list[str], theirs: list[str]) -> tuple[str, str]:
    """Return two paths without the end that they share; empty if they are equal."""
    while mine and theirs and mine[-1] == theirs[-1]:
        mine, theirs = mine[:-1], theirs[:-1]
    return ".".join(mine), ".".join(theirs)


def _roots(names: dict[str, str]) -> dict[str, str]:
    """Return the original root for each of the other program that is called in its place, as a wrapper is."""
    return {theirs.partition(".")[0]: mine for theirs, mine in names.items() if "." not in mine}


def _translated(name: str, names: dict[str, str]) -> str:
    quantity, _, rest = name.partition(":")
    before = ""
    if quantity == "optimizer state":
        before, _, rest = rest.partition(".")
        before += "."
    names = _roots(names) if quantity == "output" else names
    for theirs, mine in names.items():
        if rest == theirs or rest.startswith((f"{theirs}.", f"{theirs} ")):
            return f"{quantity}:{before}{mine}{rest[len(theirs) :]}"
    return name


def built_otherwise(found: list[str], one: Trial, other: Trial) -> tuple[list[str], list[str]]:
    """Split differences into those of results, and those of how a program is built.

    As an attribute of a module that the other program lacks, or how often a module without hooks is called.
    If only its children are called, its `forward` was called directly, which skips the hooks of wrappers.
    Where both have gradients, losses and outputs are of how a batch is divided, if their number differs.
    """
    built = {label for label in found if _is_built(label, one, other)}
    return [label for label in found if label not in built], [one for one in found if one in built]


def _is_built(label: str, one: Trial, other: Trial) -> bool:
    number, _, name = label.partition("/")
    steps = [trial.steps[int(number)].digests for trial in (one, other)]
    sides = [digests.get(name) for digests in steps]
    kind, _, rest = name.partition(":")
    if kind == "attribute":
        return None in sides
    if kind == "hyperparameter":
        return _rounds(*sides)
    if kind == "random state":  # of a device that neither uses, as FSDP seeds one
        return rest.startswith("cuda") and one.device == other.device == "cpu"
    if kind in ("loss", "output"):
        return _divided(f"{kind}:{_root(kind, rest)}", steps)
    has_children = any(label.startswith(f"{name}.") for digests in steps for label in digests)
    # Calls, pre-hooks and hooks: a hook may do anything.
    plain = all(text is None or text.endswith(" 0, 0]") for text in sides)
    divided = _divided(f"output:{rest.partition('.')[0]}", steps)
    return kind == "call" and plain and (divided or not has_children)


def _root(kind: str, rest: str) -> str:
    """Return `"Net"` for `"Net (2).1"`, the second tensor of an output of the second call."""
    return (rest.rpartition(".")[0] if kind == "output" else rest).partition(" (")[0]


def _divided(root: str, steps: list[dict[str, str]]) -> bool:
    """Return True if the steps have another number of calls, and both have gradients."""
    kind, _, name = root.partition(":")
    calls = [
        {
            one.rpartition(".")[0] if kind == "output" else one
            for one in digests
            if one.startswith(root) and _root(kind, one.partition(":")[2]) == name
        }
        for digests in steps
    ]
    trains = all(any(one.startswith("gradient:") for one in digests) for digests in steps)
    return trains and len(calls[0]) != len(calls[1])


def _rounds(one: str | None, other: str | None) -> bool:
    """Return True for two numbers that differ by rounding alone."""
    try:
        a, b = float(one or ""), float(other or "")
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=_SETTING_ROUNDS)


def said_of(built: list[str]) -> str:
    """Describe the differences, and which quantities they keep from being compared."""
    if not built:
        return ""
    text = f"first in {name_of(built[0])}"
    kinds = {name_of(label).partition(":")[0] for label in built}
    gone = [f"{kind}s" for kind in ("loss", "output") if kind in kinds]
    names = " and ".join(gone).replace("losss", "losses")
    return f"{text}; {names} are of another number of calls, and not compared" if gone else text
