"""Comparison of two trials' results, step by step and name by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from torchtrim.evidence.evidence import HEADER, QUANTITIES
from torchtrim.records.certificate import Coverage
from torchtrim.records.trial import RootCall, Trial, TrialStep

_SINGULAR_PLURAL = {
    "loss": ("loss", "losses"),
    "random state": ("random generator", "random generators"),
    "call": ("count of calls", "counts of calls"),
    "checkpoint": ("tensor saved and loaded", "tensors saved and loaded"),
}
_MOST_LEFT = 4096  # bytes; arbitrary, above scalars such as counters and below any activation
_MEASURED = 2  # steps that must keep more, since a buffer made in one step is no leak
# Gloo's threads free blocks unseen: measured, in four of ten steps of a rank whose modules are sharded.
_MEASURED_OF_RANKS = 6
GENERATOR = "script generator:"
KEPT_BY_PYTHON = ("attribute:", "script state:", GENERATOR)
_COUNTED = ("random state:", "step:", "hyperparameter:", "call:", "exception:", "memory:")
_MOST_KEPT = 48  # arbitrary, enough of each quantity and few enough to write quickly


def differences(one: Trial, other: Trial) -> list[str]:
    """Return the differences, as `"step/quantity:name"` in the order of computation."""
    found = []
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=False)):
        names = [*a.digests, *(name for name in b.digests if name not in a.digests)]
        names = [name for name in names if _is_on_both(name, a, b)]
        found += [f"{number}/{n}" for n in names if a.digests.get(n) != b.digests.get(n)]
    if len(one.steps) != len(other.steps):
        found.append(f"{min(len(one.steps), len(other.steps))}/step:count")
    return found


def _is_on_both(name: str, one: TrialStep, other: TrialStep) -> bool:
    if not name.startswith(("script state:", GENERATOR)) or (
        name in one.digests and name in other.digests
    ):
        return True
    return name.startswith(GENERATOR) and name in one.digests and _is_replaced(name, one, other)


def _is_replaced(name: str, one: TrialStep, other: TrialStep) -> bool:
    """Return True if the other step lacks this generator's state, and has a new one of its kind."""
    mine, others = _states(one), _states(other)
    state = mine[name]
    if state in others.values():
        return False
    kind = state.partition(" ")[0]
    new = (value for key, value in others.items() if key not in mine)
    return any(value.startswith(f"{kind} ") and value not in mine.values() for value in new)


def _states(step: TrialStep) -> dict[str, str]:
    return {name: value for name, value in step.digests.items() if name.startswith(GENERATOR)}


def left_behind(one: Trial, other: Trial) -> list[str]:
    """Return a difference if the other keeps more memory live after each of the last measured steps."""
    needed = _MEASURED_OF_RANKS if _has_gloo(other) else _MEASURED
    pairs = list(zip(one.steps, other.steps, strict=False))
    last = [(a, b) for a, b in pairs if a.peak_bytes and b.peak_bytes][-needed:]
    later = min(len(pairs) - one.request.warmup - 1, len(last))
    grows = later == needed and all(b.left_bytes - a.left_bytes > _MOST_LEFT for a, b in last)
    return [f"{len(pairs) - 1}/memory:left behind"] if grows else []


def _has_gloo(trial: Trial) -> bool:
    """Return True if it is of a rank whose collectives run on the CPU."""
    return trial.device == "cpu" and trial.profile is not None and trial.profile.world > 1


def compared(one: Trial, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return counts of the compared values, such as `"24 gradients x 4 steps"`, but for some labels."""
    totals: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for number, step in enumerate(one.steps):
        names = (name for name in step.digests if f"{number}/{name}" not in without)
        kinds = Counter(name.partition(":")[0] for name in names)
        totals.update(kinds)
        steps.update(kinds.keys())
    said = []
    for kind in filter(totals.get, QUANTITIES):
        count = round(totals[kind] / steps[kind])
        name = _SINGULAR_PLURAL.get(kind, (kind, f"{kind}s"))[count != 1]
        said.append(f"{count} {name} x {steps[kind]} steps")
    return tuple(said)


def is_kept(folder: Path, number: int) -> bool:
    """Return True if a run computed a value that it was to keep."""
    return (folder / f"kept-{number}").exists()


def load_kept(folder: Path, number: int) -> torch.Tensor | None:
    """Return a kept value in float64, None if the run did not compute it."""
    path = folder / f"kept-{number}"
    if not path.exists():
        return None
    size = path.stat().st_size
    mapped = torch.from_file(str(path), size=size, dtype=torch.uint8, device="cpu")
    dtype = getattr(torch, bytes(mapped[:HEADER].tolist()).decode().strip())
    return wide(mapped[HEADER:].view(dtype))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, or in complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def largest_difference(one: Path, other: Path, names: Sequence[str]) -> float:
    """Return the largest difference among kept values, relative to the largest magnitude of their group, or
    inf if shapes, NaNs or presence differ.

    A group is a quantity in a step: a gradient that is zero up to rounding is compared on the scale of the
    other gradients.
    """
    scales: dict[str, float] = {}
    gaps: dict[str, float] = {}
    for number, name in enumerate(names):
        gap, scale = difference(load_kept(one, number), load_kept(other, number))
        group = group_of(name)
        scales[group] = max(scales.get(group, 0.0), scale)
        gaps[group] = max(gaps.get(group, 0.0), gap)
    return max((gap / scales[g] if gap else 0.0 for g, gap in gaps.items()), default=0.0)


def unlike(one: Path, other: Path, names: Sequence[str]) -> str:
    """Name the first value that differs by more than a number, and say how; empty without one."""
    for number, name in enumerate(names):
        a, b = load_kept(one, number), load_kept(other, number)
        if math.isfinite(difference(a, b)[0]):
            continue
        what = f"{name_of(name)} of step {int(name.partition('/')[0]) + 1}"
        if a is None or b is None:
            return f"{what} is only in the {'other' if a is None else 'original'}"
        if a.shape != b.shape:
            return f"{what} has shape {[*a.shape]}, and {[*b.shape]} in the other"
        return f"{what} has other values that are NaN or infinite"
    return ""


def group_of(name: str) -> str:
    """Return the quantities that a value is near zero among.

    As `"1/optimizer state exp_avg.0"` for `"1/optimizer state:0.net.weight.exp_avg.0"`, and `"1/gradient"`
    for all gradients of a step.
    """
    quantity, _, rest = name.partition(":")
    if quantity.endswith("optimizer state"):
        return f"{quantity} {'.'.join(rest.split('.')[-2:])}"
    return quantity if quantity.endswith(("gradient", "parameter")) else f"{quantity} {rest}"


def difference(one: torch.Tensor | None, other: torch.Tensor | None) -> tuple[float, float]:
    """Return the largest difference of two values in float64, and their largest finite magnitude.

    It is inf if shapes or presence differ, or one of two numbers is not finite; equal NaNs are equal.
    """
    if one is None or other is None or one.shape != other.shape:
        return math.inf, 1.0
    if one.numel() == 0:
        return 0.0, 0.0
    gap, scale = _largest(one - other), max(_largest(one), _largest(other))
    if math.isfinite(gap) and math.isfinite(scale):
        return gap, scale
    finite = one.isfinite() & other.isfinite()
    if not bool(finite.all()):
        strange = ~finite
        if not torch.equal(
            one[strange].nan_to_num(), other[strange].nan_to_num()
        ) or not torch.equal(one.isnan(), other.isnan()):
            return math.inf, 1.0
        one, other = one[finite], other[finite]
    if one.numel() == 0:
        return 0.0, 0.0
    gap, scale = _largest(one - other), max(_largest(one), _largest(other))
    return (gap, scale) if math.isfinite(gap) else (math.inf, scale)


def _largest(values: torch.Tensor) -> float:
    """Return the largest magnitude, or NaN if there is one."""
    if values.is_complex():
        return float(values.abs().max())
    return max(abs(float(one)) for one in values.aminmax())


def is_updated(label: str) -> bool:
    """Return True for a quantity that an update computes."""
    return label.partition("/")[2].startswith(("parameter:", "optimizer state:"))


def name_of(label: str) -> str:
    """Return `"loss:loss"` for `"0/loss:loss"`."""
    return label.partition("/")[2]


def before_update(labels: Sequence[str]) -> Iterator[str]:
    """Yield the labels of the first step, up to the gradients of its first update."""
    first = labels[0].partition("/")[0] if labels else ""
    graded = False
    for label in labels:
        step, _, name = label.partition("/")
        is_gradient = name.startswith("gradient:")
        if step != first or (graded and not is_gradient):
            return
        graded = graded or is_gradient
        yield label


def first_quantities(trial: Trial) -> tuple[str, ...]:
    """Return the labels of the first step up to its first update, then of its buffers, parameters and
    optimizer states."""
    computed = ("loss:", "output:", "gradient:")
    steps = (
        [f"{number}/{name}" for name in step.digests if not name.startswith("initial state:")]
        for number, step in enumerate(trial.steps)
        if any(name.startswith(computed) for name in step.digests)
    )
    labels = next(steps, [])
    left = (one for one in labels if is_updated(one) or name_of(one).startswith("buffer:"))
    return tuple(dict.fromkeys((*filter(has_values, before_update(labels)), *left)))


def sample_of(names: list[str]) -> tuple[str, ...]:
    """Return the first labels with values, and others spread over the rest."""
    valued = [name for name in names if has_values(name)]
    if len(valued) <= _MOST_KEPT:
        return tuple(valued)
    half = _MOST_KEPT // 2
    stride = max((len(valued) - half) // half, 1)
    return (*valued[:half], *valued[half::stride][:half])


def has_values(name: str) -> bool:
    """Return True for a label of numbers that may be rounded, not of a count or a digest alone."""
    if name_of(name).startswith((*_COUNTED, GENERATOR)):
        return False
    if name_of(name).startswith(KEPT_BY_PYTHON):
        return name.rpartition(".")[2].isdigit()
    return True


class Spot(NamedTuple):
    """Operator of a traced step, by name, module and line; empty for the end of the step."""

    op: str = ""
    module: str = ""
    path: str = ""
    line: int = 0
    phase: str = ""


class Parting(NamedTuple):
    """First difference of two runs in a step. `inputs`: a root's first input, such as `"Net.0 (0)"`, if it
    differs. `spots`: the first operators that differ, one of each run."""

    inputs: str
    spots: tuple[Spot, Spot] | None


def parting(one: Trial, other: Trial, step: int) -> Parting:
    """Return the first difference of two runs in the traced step."""
    if step >= min(len(one.steps), len(other.steps)):
        return Parting("", None)
    given, taken = one.steps[step].inputs, other.steps[step].inputs
    inputs = next((name for name in given if taken.get(name, given[name]) != given[name]), "")
    if inputs and next(iter(given)) != inputs:
        inputs = ""
    return Parting(inputs, _spots(one, other))


def said_of(one: Spot, other: Spot) -> str:
    """Explain two operators that accumulate a gradient, if one run has not cleared the gradient before."""
    pair = (one.op, other.op)
    if pair == ("aten::detach.default", "aten::add_.Tensor"):
        return ", which the other adds to one that was not cleared"
    if pair == ("aten::add_.Tensor", "aten::detach.default"):
        return ", which the other keeps alone, since it has cleared the one before"
    return ""


def _spots(one: Trial, other: Trial) -> tuple[Spot, Spot] | None:
    if not one.digests or not other.digests:
        return None
    pairs = zip(_tokens(one), _tokens(other), strict=False)
    shorter = min(len(one.digests), len(other.digests))
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), shorter)
    if first == len(one.digests) == len(other.digests):
        return None
    return _spot(one, first), _spot(other, first)


def _tokens(trial: Trial) -> list[tuple[str, str]]:
    assert trial.profile is not None
    names = (operator.name for operator in trial.profile.operators)
    return list(zip(names, trial.digests, strict=False))


def _spot(trial: Trial, number: int) -> Spot:
    profile = trial.profile
    assert profile is not None
    if number >= len(profile.operators):
        return Spot()
    operator = profile.operators[number]
    path, line, direct = trial.lines[number]
    place = profile.place_of(number)
    if place is not None and not direct:
        path, line = place.path, place.line
    return Spot(operator.name, profile.module_of(number), path, line, operator.phase)


def amplifier(one: Trial, other: Trial, limit: float) -> Spot | None:
    """Return the first operator of two traced runs in float64 whose results differ by more than a limit."""
    for number, (a, b) in enumerate(zip(one.digests, other.digests, strict=False)):
        if a != b and any(
            _apart(*pair) > limit for pair in zip(a.split(","), b.split(","), strict=False)
        ):
            return _spot(one, number)
    return None


def _apart(one: str, other: str) -> float:
    """Return the difference of two sketches, relative to the norm."""
    try:
        (sum_, norm), (others, _) = (map(float, text.split()) for text in (one, other))
    except ValueError:
        return 0.0
    return abs(sum_ - others) / norm if norm else 0.0


_MOST = 24  # lines of a certificate that a person still reads


def coverage_of(trial: Trial) -> Coverage:
    """Return the kinds of inputs, modes and devices of a trial's steps."""
    calls = list(dict.fromkeys(call for step in trial.steps for call in step.calls))
    inputs = [text for call in calls for text in call.inputs]
    said = [f"{call.root}: {', '.join(call.inputs) or 'no tensor'}" for call in calls]
    modes: dict[bool, Literal["training", "evaluation"]] = {True: "training", False: "evaluation"}
    rank = trial.profile.rank if trial.profile is not None else 0
    return Coverage(
        inputs=tuple(said[:_MOST]),
        dtypes=tuple(sorted({text.partition("[")[0] for text in inputs if "[" in text})),
        batch_sizes=tuple(sorted({*_batch_sizes(calls)})),
        dimensions=tuple(sorted({len(_shape(text)) for text in inputs})),
        modes=tuple(modes[one] for one in dict.fromkeys(call.training for call in calls)),
        steps=len(trial.steps),
        device=trial.device,
        processes=(rank,),
        complete=len(said) <= _MOST,
    )


def _batch_sizes(calls: Iterable[RootCall]) -> Iterable[int]:
    for call in calls:
        if first := next(filter(None, map(_shape, call.inputs)), ()):
            yield first[0]


def _shape(text: str) -> tuple[int, ...]:
    """Return `(8, 3)` for `"float32[8, 3]"`, with 0 for a size that differs within a tensor."""
    inner = text.partition("[")[2].rstrip("]")
    return tuple(int(size.replace("*", "0")) for size in inner.split(",")) if inner else ()
