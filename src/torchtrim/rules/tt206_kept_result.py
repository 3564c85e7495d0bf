"""A variable keeps a result after its last use, through backward or into the next step.

## What it does

Finds storages (logits, losses, batches) that live until the end of the step although neither an
operator nor backward reads them any more, and the same variable's storages from the previous step.
The price is the fall of the peak without them. Savings below 2 % of the peak are not reported. A
graph kept as a whole is TT207.

## Why is this bad?

A variable in a loop keeps its tensor until it is assigned again. Cross entropy saves its own copy
for backward, so logits held by a variable are live beside it through backward, and then through the
next forward until the next assignment.

## Example

```python
for batch, labels in loader:
    logits = model(batch)
    loss = criterion(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    accuracy += (logits.argmax(1) == labels).sum()
```

## Use instead

```python
for batch, labels in loader:
    logits = model(batch)
    loss = criterion(logits, labels)
    accuracy += (logits.detach().argmax(1) == labels).sum()
    del logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
```

If a result is needed until the end of the step, put the step into a function: its local variables
are released before the next step.

## Fix safety

Bitwise equal, if nothing reads the variable after the loop.

## References

* [PyTorch FAQ: don't hold onto tensors that you don't need](https://pytorch.org/docs/stable/notes/faq.html)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torchtrim.analysis.held import finding_at, freed, is_much, named, retained
from torchtrim.analysis.user_source import CodeLine, line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each line whose results are kept."""
    if retained(profile):
        return
    lines: dict[CodeLine, dict[int, int]] = defaultdict(dict)
    for maker, deaths in named(profile).items():
        lines[line_of(profile, maker)].update(deaths)
    for line, deaths in lines.items():
        saved = freed(profile, deaths)
        if is_much(profile, saved):
            yield finding_at(
                RULE.code,
                line,
                saved,
                "a variable keeps this result after its last use, until it is assigned again, "
                f"which raises the peak by {format_bytes(saved)}",
                "`del` the variable after its last use, or move the step into a function",
                count=len(deaths),
            )


RULE = Rule(code="TT206", name="kept-result", check=check)
