"""Something gets longer with every training step, so training ends when memory does.

## What it does

Names each container (dict, list, set, the cache of a function) that got longer in every step that was
looked at, and
each name whose tensor hangs on a graph that gets longer. The price is the bytes that a step adds: of
tensors and of
Python's objects, and, where entries hang on autograd's graph, at least what the peak rises by from step to
step. The
place is the line that fills it. A list of numbers costs next to nothing and is not reported: a finding is
worth
two hundredths of the peak over a thousand steps, and a KiB a step, unless it holds graphs. Graphs show in
five steps or more (`--steps 3`, the default, with one of warm-up and one that is recorded), containers in
six: the line is looked for in a step of its own, which no figure is of.

## Why is this bad?

A loss that is kept as a tensor keeps its graph: the nodes of every operator of that step, and all that
they saved where
backward has not been there. `total = total + loss` makes one graph of all steps. A cache by sample fills
for an epoch, which is meant; by step it fills for ever.

## Example

```python
losses = []
for batch in loader:
    loss = criterion(model(batch), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
```

## Use instead

```python
losses = []
for batch in loader:
    loss = criterion(model(batch), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
```

`loss.item()` synchronizes in every step; read the detached losses once, at the end of the epoch. Of
a cache keep the newest entries alone: `collections.deque(maxlen=n)`, `functools.lru_cache(maxsize=n)`.

## Fix safety

`detach()` keeps the value and lets the graph go: bitwise equal, unless something runs backward through it
later. What a bound drops is yours to judge.

## References

* [PyTorch FAQ: don't accumulate history across your training loop](https://pytorch.org/docs/stable/notes/faq.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.profile import Growth, Place, Profile
from torchtrim.rules.base import Rule

_STEPS = 1000  # Arbitrary; a short training run.
_SHARE = 0.02  # As in analysis/kept.py.
_LEAST = 1024  # Arbitrary; numbers of a log are smaller, tensors rarely.
_OF_GRAPHS = " of graphs"


def check(profile: Profile) -> Iterator[Finding]:
    """One finding for each thing that grows by much, or holds graphs."""
    if not profile.operators:
        return
    for growth in profile.growths:
        if _is_graph(growth) or _is_much(profile, growth):
            yield _finding(profile, growth)


def _is_graph(growth: Growth) -> bool:
    return growth.kind == "graph" or growth.kind.endswith(_OF_GRAPHS)


def _is_much(profile: Profile, growth: Growth) -> bool:
    over_steps = _STEPS * growth.bytes
    return growth.bytes >= _LEAST and over_steps >= _SHARE * profile.peak_bytes


def _finding(profile: Profile, growth: Growth) -> Finding:
    filled, led = (_place(profile, index) for index in (growth.place, growth.caller))
    place = led or filled
    inside = ""
    if led is not None and filled is not None:
        file = filled.path.replace("\\", "/").rpartition("/")[2]
        inside = f", filled at {file}:{filled.line} in {filled.function}"
    return Finding(
        code=RULE.code,
        path=place.path if place else profile.script,
        line=place.line if place else 0,
        end_line=place.line if place else 0,
        message=_message(growth) + inside,
        count_per_step=max(round(growth.entries), 1),
        price_bytes=growth.bytes,
        fix=_fix(growth),
    )


def _place(profile: Profile, index: int) -> Place | None:
    return profile.places[index] if index >= 0 else None


def _message(growth: Growth) -> str:
    more = f"{format_bytes(growth.bytes)} a step"
    if growth.kind == "graph":
        nodes = f"{growth.entries:g} operators and {more}"
        return f"the graph that {growth.name} hangs on grows by {nodes}"
    entries = f"{growth.entries:g} entr{'y' if growth.entries == 1 else 'ies'}"
    kind = growth.kind.removesuffix(_OF_GRAPHS)
    held = ", and its tensors hold their graphs" if _is_graph(growth) else ""
    return f"{kind} {growth.name} grows by {entries} and {more}{held}"


def _fix(growth: Growth) -> Suggestion:
    if _is_graph(growth):
        what = growth.name if growth.kind == "graph" else "what is put in"
        reason = f"detach it: keep tensor.detach() where {what} is kept beyond the step"
        return Suggestion(kind="advice", equivalence="BITWISE", reason=reason)
    if growth.kind == "lru_cache":
        reason = "functools.lru_cache(maxsize=n) in place of maxsize=None"
    else:
        reason = "keep the newest entries alone, such as in collections.deque(maxlen=n), or on disk"
    return Suggestion(kind="advice", reason=reason)


RULE = Rule(code="TT210", name="grows-from-step-to-step", check=check)
