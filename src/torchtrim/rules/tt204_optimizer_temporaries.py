"""An optimizer's step that updates all parameters at once sets the peak.

## What it does

Finds `step` calls of torch's own optimizers that run `foreach`, the default on a GPU, and set the
peak with their temporaries. The price is how far updating one parameter at a time would lower the
peak, from the simulator that plans are computed with. Savings below 5 % of the peak are not
reported.

## Why is this bad?

With `foreach` one operator takes all parameters, so each intermediate result, such as the square
root that Adam divides by, is as large as all parameters together. It is live only for a moment, but
at that moment the gradients and the optimizer state are live too.

## Example

```python
optimizer = torch.optim.AdamW(model.parameters())
```

## Use instead

```python
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
```

The fused kernel allocates nothing and is the fastest. If the result must stay bitwise equal,
`torchtrim optimize SCRIPT --memory 90%` runs the same operators on some of the parameters at a
time, or, if nothing reads the gradients between backward and step, in backward.

## Fix safety

`fused=True` rounds differently; so does `foreach=False` with ASGD, NAdam and RAdam, and with the
others it was bitwise equal on CPU. Chunks are bitwise equal with every optimizer.

## References

* [torch.optim: foreach, for-loop and fused](https://pytorch.org/docs/stable/optim.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.analysis.user_source import line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.commands import quoted
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.step.from_profile import step_of
from torchtrim.step.optimizers import FOREACH, OptimizerCall, in_chunks, optimizer_calls
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Step

_SHARE = 0.05  # Arbitrary; as the documentation says.


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for the optimizer whose step sets the peak."""
    step = step_of(profile)
    whole = simulate(step)
    for calls in optimizer_calls(step).values():
        for seen in calls:
            at_peak = seen.span.first <= whole.task < seen.span.last
            if at_peak and seen.style == FOREACH:
                saved = whole.peak_bytes - _without(step, seen)
                if saved >= _SHARE * whole.peak_bytes > 0:
                    yield _finding(profile, seen, saved, saved / whole.peak_bytes)


def _without(step: Step, seen: OptimizerCall) -> int:
    """Return the peak if one parameter is updated at a time."""
    edit = in_chunks(step, seen, tuple((number,) for number in range(len(seen.step.updates))))
    return simulate(step, [edit] if edit is not None else []).peak_bytes


def _finding(profile: Profile, seen: OptimizerCall, saved: int, share: float) -> Finding:
    line = line_of(profile, seen.span.first)
    name = seen.step.type.rpartition(".")[2]
    return Finding(
        code=RULE.code,
        path=line.path,
        line=line.line,
        end_line=line.line,
        message=f"{name} updates {len(seen.step.updates)} parameters at once (foreach), and its "
        f"temporaries set the peak; one at a time would free {format_bytes(saved)}, {share:.0%} of "
        "the peak",
        count_per_step=1,
        price_bytes=saved,
        source="modelled",
        fix=Suggestion(
            kind="advice",
            equivalence="BITWISE",
            reason=f"`torchtrim optimize {quoted(profile.script)} --memory "
            f"{max(100 - int(100 * share), 1)}%` does that bit for bit; `fused=True`, where the "
            "optimizer has it, allocates nothing and rounds "
            "otherwise",
        ),
    )


RULE = Rule(code="TT204", name="optimizer-temporaries", check=check)
