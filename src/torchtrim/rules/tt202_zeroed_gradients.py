"""Gradients are filled with zeros instead of dropped, so they take memory while nothing needs them.

## What it does

Finds gradients on which `zero_` ran outside of backward and that stay allocated through forward, or
at the peak, until backward adds to them. The price is the bytes that are still zero at the peak.
Gradients that hold values, as between micro-batches, are left out.

## Why is this bad?

A gradient is as large as its parameter. If dropped, it is allocated when backward reaches its
parameter, and by then the activations of the layers above are freed. If kept, it is live beside all
activations at the end of forward, where the peak usually is. Zeroing also costs a write and a read.

## Example

```python
optimizer.zero_grad(set_to_none=False)
loss = criterion(model(batch), labels)
loss.backward()
optimizer.step()
```

## Use instead

```python
loss = criterion(model(batch), labels)
loss.backward()
optimizer.step()
optimizer.zero_grad()
```

## Fix safety

Equal in every step if backward reaches each parameter, except for the sign of zeros: adding
`-0.0` to zeros gives `0.0`. Hence its class is `ROUNDING`. The optimizer skips a parameter whose
gradient is `None`, while zeros still move it through momentum or weight decay: the finding says whether the
profile shows such parameters. Code that reads `.grad` between steps must expect `None`.

## References

* [torch.optim.Optimizer.zero_grad](https://pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html)
* [Performance tuning guide: disable gradient zeroing](https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torchtrim.analysis.timeline import peak_operator
from torchtrim.analysis.user_source import CodeLine, line_of
from torchtrim.analysis.why_live import Zeroed, zeroed_gradients
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each line that fills gradients with zeros."""
    peak = peak_operator(profile)
    forward = [i for i, op in enumerate(profile.operators) if op.phase == "forward"]
    lines: dict[CodeLine, list[Zeroed]] = defaultdict(list)
    for zeroed in zeroed_gradients(profile):
        spans_forward = bisect_left(forward, zeroed.first) < bisect_left(forward, zeroed.last)
        if zeroed.first <= peak < zeroed.last or spans_forward:
            lines[line_of(profile, zeroed.by)].append(zeroed)
    for line, zeros in lines.items():
        yield _finding(profile, line, zeros, peak)


def _finding(profile: Profile, line: CodeLine, zeros: Sequence[Zeroed], peak: int) -> Finding:
    gradients = {z.storage for z in zeros}
    size = sum(profile.storages[i].counted for i in gradients)
    at_peak = {z.storage for z in zeros if z.first <= peak < z.last}
    price = sum(profile.storages[i].counted for i in at_peak)
    advice = "call zero_grad() without set_to_none=False, after the optimizer's step"
    if unused := gradients - {z.storage for z in zeros if z.accumulated}:
        advice = (
            f"call zero_grad() without set_to_none=False; but {_gradients(len(unused))} got "
            "nothing from backward in this step, and the optimizer skips a parameter without one"
        )
    return line.finding(
        RULE.code,
        f"{_gradients(len(gradients))} ({format_bytes(size)}) are filled with zeros "
        f"instead of dropped; {format_bytes(price)} of them are still zero at the peak",
        advice,
        equivalence="SEMANTIC" if unused else "ROUNDING",
        count_per_step=len({z.by for z in zeros}),
        price_bytes=price,
    )


def _gradients(count: int) -> str:
    return f"{count} gradient{'s' * (count != 1)}"


RULE = Rule(code="TT202", name="gradients-zeroed-not-dropped", check=check)
