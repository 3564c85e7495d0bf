"""Gradients of the previous step are still live at the peak of the next one, which drops them unread.

## What it does

Finds gradients that are live when a step begins, that no operator reads or writes, and that are
dropped before backward creates new ones. The price is the fall of the peak without them. Savings
below 2 % of the peak are not reported. Gradients that are added to, as between micro-batches, are
left out.

## Why is this bad?

Once the optimizer has stepped, gradients are useless. If `zero_grad` comes right before `backward`,
they are live beside all activations at the end of the next forward, where the peak usually is.

## Example

```python
loss = criterion(model(batch), labels)
optimizer.zero_grad()
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

Bitwise equal. Code that reads `.grad` after the step, such as a log of its norm, must run before
`zero_grad`.

## References

* [torch.optim.Optimizer.zero_grad](https://pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.analysis.held import dropped_unread, finding_at, freed, is_much
from torchtrim.analysis.user_source import CodeLine
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for all gradients that are dropped too late."""
    stale = dropped_unread(profile, "gradient")
    saved = freed(profile, dict.fromkeys(stale, 0))
    if is_much(profile, saved):
        many = f"{len(stale)} gradient{'s' * (len(stale) != 1)}"
        size = format_bytes(sum(profile.storages[n].counted for n in stale))
        yield finding_at(
            RULE.code,
            CodeLine(profile.script, 0),
            saved,
            f"{many} of the previous step ({size}) are dropped only after the next forward has "
            f"begun, which raises the peak by {format_bytes(saved)}",
            "call zero_grad() directly after the optimizer's step",
        )


RULE = Rule(code="TT205", name="stale-gradients", check=check)
