"""Repeated blocks keep activations for backward that could be recomputed.

## What it does

Finds modules of one type that occur at least twice side by side, such as the layers of a
transformer, and adds up the activations that they keep for backward at the peak, except their
inputs and outputs. The price is the fall of the peak if all blocks are recomputed; the finding
also gives the additional time. Both come from the planner's simulator. Savings below 10 % of the
peak are not reported.

## Why is this bad?

Between forward and backward a network holds every intermediate result of every block. For most
networks that is the larger part of the peak, and it grows with the batch, while the block's input,
which is enough to recompute the rest, is a small part of it.

## Example

```python
for block in self.blocks:
    x = block(x)
```

## Use instead

```python
for block in self.blocks:
    x = checkpoint(block, x, use_reentrant=False)
```

`torchtrim optimize SCRIPT --memory 60%` chooses the blocks for a budget, applies recomputation
without changing the source, and proves that the step computes the same.

## Fix safety

Bitwise equal if the block draws the same random numbers again, which `preserve_rng_state=True` (the
default) ensures, and if running its forward twice has no side effects. BatchNorm updates its
running statistics twice: swap its buffers while recomputing, as torchtrim does. A block that writes
to its input in place cannot be recomputed.

## References

* [torch.utils.checkpoint](https://pytorch.org/docs/stable/checkpoint.html)
* [Training deep nets with sublinear memory cost](https://arxiv.org/abs/1604.06174)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchtrim.analysis.prices import timed_step
from torchtrim.analysis.timeline import peak_operator, timeline
from torchtrim.analysis.user_source import line_of
from torchtrim.analysis.why_live import released_by_recompute
from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records.commands import fitting
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Call, Profile
from torchtrim.rules.base import Rule
from torchtrim.step.rerun import rerun
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Span

_SHARE = 0.1  # Arbitrary; as the documentation says.


class _Blocks(NamedTuple):
    """All calls of the repeated modules of one type: the bytes they hold at the peak, and the savings.

    `cost`: the time of their recomputation, in words; empty if the step has no times, as in a dry run.
    """

    type: str
    modules: frozenset[int]
    calls: tuple[Call, ...]
    held: int
    saved: int
    cost: str


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each type of block; of nested types, the one that saves most."""
    at = peak_operator(profile)
    peak = timeline(profile).high[at] if at >= 0 else 0
    worth = [b for b in _repeated_blocks(profile, at) if b.saved >= _SHARE * peak > 0]
    taken: set[int] = set()
    around: set[int] = set()
    for blocks in sorted(worth, key=lambda b: (-b.saved, b.type)):
        nested = _with_ancestors(profile, blocks.modules)
        if not (nested & taken or blocks.modules & around):
            taken |= blocks.modules
            around |= nested
            yield _finding(profile, blocks, peak)


def _repeated_blocks(profile: Profile, at: int) -> Iterator[_Blocks]:
    calls = _repeated_calls(profile)
    held = released_by_recompute(profile, calls, at)
    step, where = timed_step(profile)
    groups: dict[str, list[tuple[Call, int]]] = defaultdict(list)
    for call, size in zip(calls, held, strict=True):
        groups[profile.modules[call.module].type].append((call, size))
    for name, group in groups.items():
        spans = [Span(call.first, call.last) for call, _ in group]
        edit = rerun(step, spans, early_stop=True)
        if edit is not None:
            more = f", for about {format_seconds(edit.seconds)} more a step{where}"
            yield _Blocks(
                type=name,
                modules=frozenset(call.module for call, _ in group),
                calls=tuple(call for call, _ in group),
                held=sum(size for _, size in group),
                saved=simulate(step).peak_bytes - simulate(step, [edit]).peak_bytes,
                cost=more if any(task.seconds for task in step.tasks) else "",
            )


def _repeated_calls(profile: Profile) -> list[Call]:
    """Return calls, with gradients, of modules with a sibling of their type; the outermost calls only."""
    siblings = Counter((m.parent, m.type) for m in profile.modules if m.parent >= 0)
    repeated = {name for (_, name), count in siblings.items() if count > 1}
    around: list[frozenset[str]] = []  # for each module, the types around it without the root's
    for module in profile.modules:
        above = profile.modules[module.parent] if module.parent >= 0 else None
        own = {above.type} if above is not None and above.parent >= 0 else set()
        around.append((around[module.parent] if above is not None else frozenset()) | own)
    return [
        call
        for call in profile.calls
        if call.graded and call.first < call.last
        for module in (profile.modules[call.module],)
        if module.type in repeated and module.parent >= 0 and module.type not in around[call.module]
    ]


def _with_ancestors(profile: Profile, modules: Iterable[int]) -> set[int]:
    nested: set[int] = set()
    for index in modules:
        while index >= 0 and index not in nested:
            nested.add(index)
            index = profile.modules[index].parent
    return nested


def _finding(profile: Profile, blocks: _Blocks, peak: int) -> Finding:
    paths = [profile.modules[i].path for i in sorted(blocks.modules)]
    return line_of(profile, blocks.calls[0].first).finding(
        RULE.code,
        f"{len(paths)} {blocks.type} blocks ({paths[0]} to {paths[-1]}) keep "
        f"{format_bytes(blocks.held)} of activations at the peak; computing them again in backward "
        f"frees about {format_bytes(blocks.saved)}, {blocks.saved / peak:.0%} of the peak{blocks.cost}",
        f"`{fitting(script=profile.script)}` chooses which of them to "
        "recompute and proves that the step computes the same",
        equivalence="BITWISE",
        count_per_step=len(blocks.calls),
        price_bytes=blocks.saved,
        source="modelled",
    )


RULE = Rule(code="TT203", name="recomputable-activations", check=check)
