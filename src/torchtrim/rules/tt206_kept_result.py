"""A result has a name that keeps it after its last use, through backward or into the next step.

## What it does

Finds storages that live until the step is over although no operator and no backward looks at them any more,
with those of the step before that live until the same name is given to what this step makes: logits, losses,
batches. The price is by how much the peak would be lower without them. Nothing is reported below 2 % of the
peak. A graph that is kept as a whole is TT207.

## Why is this bad?

A name in a loop keeps its tensor until it is assigned again. Cross entropy keeps its own copy of what
backward needs, so logits that have a name lie beside it through backward, and then through the next forward,
at whose end they are assigned again.

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

A result that is needed until the step is over is at least gone before the next one if the step is a
function, whose names end when it returns.

## Fix safety

Bitwise equal, where nothing reads the name after the loop.

## References

* [PyTorch FAQ: don't hold onto tensors that you don't need](https://pytorch.org/docs/stable/notes/faq.html)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torchtrim.analysis.held import freed, named, retained
from torchtrim.analysis.kept import finding_at, is_much
from torchtrim.analysis.places import Line, line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """One finding for each line whose results are kept."""
    if retained(profile):
        return
    lines: dict[Line, dict[int, int]] = defaultdict(dict)
    for maker, deaths in named(profile).items():
        lines[line_of(profile, maker)].update(deaths)
    for line, deaths in lines.items():
        saved = freed(profile, deaths)
        if is_much(profile, saved):
            yield finding_at(
                RULE.code,
                line,
                saved,
                "what this makes has a name that keeps it after its last use, until the name is given to "
                f"something else; the peak is {format_bytes(saved)} higher for it",
                "`del` the name after its last use, or do the step in a function",
                count=len(deaths),
            )


RULE = Rule(code="TT206", name="kept-result", check=check)
