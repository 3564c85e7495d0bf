"""One rank needs at least a tenth more memory than the others.

## What it does

Compares the peaks of all ranks, and reports the largest if it is a tenth, and at least a mebibyte,
above the median rank's. The price is the difference. The finding names the tensor that explains
most of it.

## Why is this bad?

The batch must fit the rank that needs most; on the others memory is unused. Often it is rank 0,
which keeps what it logs, evaluates or saves.

## Example

```python
if dist.get_rank() == 0:
    outputs.append(model(inputs))
```

## Use instead

```python
if dist.get_rank() == 0:
    outputs.append(model(inputs).detach().cpu())
```

Load checkpoints with `map_location`: without it every rank loads onto the device that wrote it.

## Fix safety

Copies on the host have the same values.

## References

* [Saving and loading DDP checkpoints](https://pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median_low

from torchtrim.analysis.peak import holders
from torchtrim.analysis.user_source import CodeLine
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.records.report import Holder
from torchtrim.rules.base import Rule

_LEAST = 2**20  # Arbitrary; as the documentation says.
_SHARE = 0.1  # Arbitrary; as the documentation says.
_MANY = 1000  # Arbitrary; in effect all holders, which are compared by name.


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Yield one finding if the largest rank needs much more than the median one."""
    usual = median_low(profile.peak_bytes for profile in profiles)
    largest = max(profiles, key=lambda profile: profile.peak_bytes)
    more = largest.peak_bytes - usual
    if more < max(_LEAST, _SHARE * usual):
        return
    middle = next(profile for profile in profiles if profile.peak_bytes == usual)
    held = _held_more(largest, middle)
    what = (
        f"most of it {held.kind} {held.module}".rstrip() if held else "no single tensor explains it"
    )
    path = held.path if held and held.path else largest.script
    yield CodeLine(path, held.line if held else 0).finding(
        RULE.code,
        f"rank {largest.rank} peaks at {format_bytes(largest.peak_bytes)}, "
        f"{format_bytes(more)} over rank {middle.rank}: {what}",
        f"have rank {largest.rank} keep no more than the others, or keep it on the host",
        price_bytes=more,
    )


def _held_more(largest: Profile, other: Profile) -> Holder | None:
    more = Counter[_Key]()
    every = holders(largest, most=_MANY)
    for held in every:
        more[_key(held)] += held.bytes
    for held in holders(other, most=_MANY):
        more[_key(held)] -= held.bytes
    excess, _, holder = max(
        ((more[_key(holder)], -number, holder) for number, holder in enumerate(every)),
        default=(0, 0, None),
    )
    return holder if excess > 0 else None


_Key = tuple[str, str, str, int]


def _key(holder: Holder) -> _Key:
    return holder.kind, holder.module, holder.path, holder.line


RULE = Rule(code="TT605", name="uneven-memory", across=across)
