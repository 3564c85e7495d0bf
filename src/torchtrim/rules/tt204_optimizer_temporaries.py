"""An optimizer's step that updates all parameters at once sets the peak.

## What it does

Finds `step` calls of torch's own optimizers that run `foreach`, the default on a GPU, and set the
peak with their temporaries. The price is the fall of the peak if one parameter is updated at a time,
from the planner's simulator. Savings below 5 % of the peak are not reported.

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
from torchtrim.records.commands import command
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.step.from_profile import step_of
from torchtrim.step.optimizers import FOREACH, OptimizerCall, in_chunks, optimizer_calls
from torchtrim.step.simulate import simulate

_SHARE = 0.05  # Arbitrary; as the documentation says.


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for the optimizer whose step sets the peak."""
    step = step_of(profile)
    original = simulate(step)
    for call in (call for calls in optimizer_calls(step).values() for call in calls):
        if call.style == FOREACH and call.span.first <= original.task < call.span.last:
            one_by_one = tuple((number,) for number in range(len(call.step.updates)))
            edit = in_chunks(step, call, one_by_one)
            changed = simulate(step, [edit] if edit is not None else [])
            saved = original.peak_bytes - changed.peak_bytes
            if saved >= _SHARE * original.peak_bytes > 0:
                yield _finding(profile, call, saved, saved / original.peak_bytes)


def _finding(profile: Profile, call: OptimizerCall, saved: int, share: float) -> Finding:
    budget = f"{max(100 - int(100 * share), 1)}%"
    return line_of(profile, call.span.first).finding(
        RULE.code,
        f"{call.step.type.rpartition('.')[2]} updates {len(call.step.updates)} parameters at once "
        f"(foreach), and its temporaries set the peak; one at a time would free {format_bytes(saved)}, "
        f"{share:.0%} of the peak",
        f"`{command('optimize', '--memory', budget, script=profile.script)}` does that bit for bit; "
        "`fused=True`, if the optimizer supports it, allocates nothing and "
        "rounds differently",
        equivalence="BITWISE",
        price_bytes=saved,
        source="modelled",
    )


RULE = Rule(code="TT204", name="optimizer-temporaries", check=check)
