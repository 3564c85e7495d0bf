"""Something gets longer with every training step, so training ends when memory does.

## What it does

Lists each container (dict, list, set, a function's cache) that grew in every observed step, and
each variable whose tensor is attached to a growing graph. The price is the bytes that a step adds:
tensors, Python objects and, for entries that hold autograd graphs, at least the growth of the peak
from step to step. The finding points to the line that fills the container. A list of numbers costs
almost nothing and is not reported: a finding needs 2 % of the peak over a thousand steps, and a KiB
a step, unless it holds graphs. Graphs show in five steps or more (`--steps 3`, the default, with
one warm-up step and one recorded step), containers in six: the filling line is found in a separate
step that does not count in any figure.

## Why is this bad?

A loss that is kept as a tensor keeps its graph: the nodes of every operator of that step, and all
their saved tensors that backward has not released. `total = total + loss` builds one graph of all
steps. A cache by sample fills for an epoch, which is intended; a cache by step fills forever.

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

`loss.item()` synchronizes in every step; read the detached losses once, at the end of the epoch.
Limit a cache to its newest entries: `collections.deque(maxlen=n)`,
`functools.lru_cache(maxsize=n)`.

## Fix safety

`detach()` keeps the value and releases the graph: bitwise equal, unless something runs backward
through it later. Check yourself that nothing needs the entries that a limit drops.

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
_SHARE = 0.02  # As in analysis/held.py.
_LEAST = 1024  # Arbitrary; numbers of a log are smaller, tensors rarely.
_OF_GRAPHS = " of graphs"


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each container or graph that grows by much, or holds graphs."""
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
        return f"the graph of {growth.name} grows by {nodes}"
    entries = f"{growth.entries:g} entr{'y' if growth.entries == 1 else 'ies'}"
    kind = growth.kind.removesuffix(_OF_GRAPHS)
    held = ", and its tensors hold their graphs" if _is_graph(growth) else ""
    return f"{kind} {growth.name} grows by {entries} and {more}{held}"


def _fix(growth: Growth) -> Suggestion:
    if _is_graph(growth):
        what = growth.name if growth.kind == "graph" else "the entry"
        reason = f"detach it: keep tensor.detach() where {what} is kept beyond the step"
        return Suggestion(kind="advice", equivalence="BITWISE", reason=reason)
    if growth.kind == "lru_cache":
        reason = "functools.lru_cache(maxsize=n) in place of maxsize=None"
    else:
        reason = "keep only the newest entries, such as in collections.deque(maxlen=n), or on disk"
    return Suggestion(kind="advice", reason=reason)


RULE = Rule(code="TT210", name="grows-from-step-to-step", check=check)
