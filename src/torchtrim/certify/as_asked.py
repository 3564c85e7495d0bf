"""A plan that makes another function since it was asked to: all else is compared with that by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from torchtrim.certify.certify import ROUNDING_LIMIT
from torchtrim.core.isolation import isolated
from torchtrim.executor.registry import Replaces, technique
from torchtrim.records.certificate import Asked, Certificate
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.trial import Request, Trial

_COARSE = ("precision", "low_bit_states", "compress_gradients")
_COARSE_LIMIT = 0.5
"""The largest difference that may be rounding where a program computes in half precision, or keeps 8 bits:
bfloat16 has 8 bits, 2**16 times fewer than float32. Whether it is rounding float64 says."""


def asked_of(plan: Plan) -> tuple[Technique, ...]:
    """The techniques of a plan that make another function."""
    return tuple(one for one in plan.techniques if one.equivalence == "SEMANTIC")


def limit_of(plan: Plan) -> float:
    """Above it no difference from the program with its replacement made by hand is taken for rounding."""
    coarse = any(one.name in _COARSE for one in asked_of(plan))
    return _COARSE_LIMIT if coarse else ROUNDING_LIMIT


def by_hand(request: Request, plan: Plan) -> Request:
    """The request for the original in which a person made the same replacement, and nothing else."""
    alone = msgspec.structs.replace(plan, techniques=asked_of(plan))
    return msgspec.structs.replace(request, plan=alone, by_hand=True, exported="")


def as_asked(found: Certificate, plan: Plan, original: Trial, planned: Trial) -> Certificate:
    """The certificate of a plan from that against the original with its replacement made by hand."""
    names = tuple(dict.fromkeys(one.name for one in asked_of(plan)))
    made = " and ".join(names)
    if found.verdict not in ("BITWISE", "ROUNDING"):
        reason = f"compared with the original in which {made} was made by hand: {found.reason}"
        return msgspec.structs.replace(found, reason=reason)
    mine, others = losses_of(planned), losses_of(original)
    asked = Asked(
        techniques=names,
        others="BITWISE" if found.verdict == "BITWISE" else "ROUNDING",
        losses=mine,
        original_losses=others,
        largest_difference=_apart(mine, others),
    )
    equal = _EQUAL[asked.others]
    reason = f"{made} was asked for; all else is {equal} that of the original with it made by hand"
    said = "; ".join((reason, loss_sentence(asked), *_advice(plan)))
    return msgspec.structs.replace(found, verdict="AS ASKED", asked=asked, reason=said)


def _advice(plan: Plan) -> Iterator[str]:
    for one in asked_of(plan):
        with isolated("technique", one.name):
            unit = technique(one.name)
            if isinstance(unit, Replaces) and (said := unit.advice(one)):
                yield said


_EQUAL = {"BITWISE": "bit for bit", "ROUNDING": "up to rounding"}


def losses_of(trial: Trial) -> tuple[float | None, ...]:
    """The last loss of each compared step that had one."""
    return tuple(step.losses[-1] for step in trial.steps if step.losses)


def loss_sentence(asked: Asked) -> str:
    """What the replacement does to the loss, in a sentence."""
    pairs = list(zip(asked.original_losses, asked.losses, strict=False))
    if not pairs:
        return "no loss was seen"
    (first, _), (last, now) = pairs[0], pairs[-1]
    steps = f"after {len(pairs)} step{'' if len(pairs) == 1 else 's'}"
    if last is None or now is None or first is None or asked.largest_difference is None:
        return f"the loss is not finite {steps}: {_figure(now)} where the original's is {_figure(last)}"
    return (
        f"the loss {steps} is {_figure(now)} where the original's is {_figure(last)}, which began at "
        f"{_figure(first)}; they differ by {asked.largest_difference:.1e} at most"
    )


def _figure(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.6g}"


def _apart(mine: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """The largest difference, relative to the largest of the original's."""
    pairs = [(a, b) for a, b in zip(mine, others, strict=False) if a is not None and b is not None]
    if not pairs or len(pairs) < max(len(mine), len(others)):
        return None
    scale = max(abs(b) for _, b in pairs)
    found = max(abs(a - b) for a, b in pairs) / scale if scale else 0.0
    return found if math.isfinite(found) else None
