"""The script's own checkpointing or offload takes time, and memory may have room without it.

## What it does

Finds operators that run again in backward because the script checkpoints, and activations that it
copies to the host and back. The price is the time that they take. The message gives an upper bound
of the peak without them, from the planner's simulator. Less than 3 % of the step's time is not
reported.

## Why is this bad?

Checkpointing every block adds about one forward to each step, and often stays enabled after a model
or a batch that was once larger. If the peak without it fits, that time buys nothing; if not,
checkpointing some of the blocks is usually enough.

## Example

```python
for block in self.blocks:
    x = checkpoint(block, x, use_reentrant=False)
```

## Use instead

```python
for block in self.blocks:
    x = block(x)
```

If that does not fit, `torchtrim optimize SCRIPT --memory 20GiB` recomputes only what the budget
needs.

## Fix safety

Bitwise equal if the checkpoint was: it draws the same random numbers (`preserve_rng_state=True`,
the default), and the code inside has no side effects. BatchNorm inside a checkpoint updates its
statistics twice, and without it once.

## References

* [torch.utils.checkpoint](https://pytorch.org/docs/stable/checkpoint.html)
* [torch.autograd.graph.save_on_cpu](https://pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.analysis.prices import timed_step
from torchtrim.analysis.user_source import line_of
from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records.finding import Finding
from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import DEVICE_POOL, Operator, Profile
from torchtrim.rules.base import Rule
from torchtrim.step.edits import Block, Edit
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Step

_SHARE = 0.03  # Arbitrary; as the documentation says.


class _Saving(NamedTuple):
    """The script's own way to save memory: its operators, and the tensors kept without them."""

    what: str
    advice: str
    operators: tuple[int, ...]
    kept: tuple[Block, ...]


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for checkpointing, one for offload."""
    step, where = timed_step(profile)
    for saving in (_checkpointing(profile), _offload(profile)):
        seconds = sum(step.tasks[index].seconds for index in saving.operators)
        if saving.kept and seconds >= _SHARE * sum(task.seconds for task in step.tasks) > 0:
            yield _finding(profile, step, saving, seconds, where)


def _finding(profile: Profile, step: Step, saving: _Saving, seconds: float, where: str) -> Finding:
    now = simulate(step).peak_bytes
    without = simulate(step, [Edit(blocks=saving.kept)]).peak_bytes
    return line_of(profile, saving.operators[0]).finding(
        RULE.code,
        f"{saving.what} {format_seconds(seconds)} of each step{where}; without it the peak is "
        f"{format_bytes(max(without, now))} at most, and with it {format_bytes(now)}",
        saving.advice,
        equivalence="BITWISE",
        count_per_step=len(saving.operators),
        price_ms=1e3 * seconds,
        source="modelled",
    )


def _checkpointing(profile: Profile) -> _Saving:
    """Find operators that run again; without checkpointing, their saved tensors would be kept from the
    first run on."""
    first: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    read = {n for op in profile.operators if op.phase == "backward" for n in _read(op)}
    again, kept = [], []
    for index, op in enumerate(profile.operators):
        key = op.module, op.name
        if op.phase == "forward":
            first[key].append(index)
        elif op.phase == "recompute":
            again.append(index)
            begins = first[key].pop() if first[key] else index
            kept += [
                Block(storage.bytes, begins, index)
                for number in _written(op)
                if (storage := profile.storages[number]).birth == index and number in read
            ]
    return _Saving(
        "the script's own checkpointing runs operators again, for",
        "remove the checkpoint if that fits; else let `torchtrim optimize` choose what to recompute",
        tuple(again),
        tuple(kept),
    )


def _offload(profile: Profile) -> _Saving:
    """Find copies to the host and back; the device would keep those tensors from the first copy on."""
    away: dict[int, int] = {}
    operators, kept = [], []
    for index, op in enumerate(profile.operators):
        if base_name(op.name) not in ("aten::_to_copy", "aten::copy_"):
            continue
        sources = _read(op) - _written(op)
        is_activation = any(
            profile.storages[n].pool == DEVICE_POOL and profile.storages[n].birth >= 0
            for n in sources
        )
        for number in (n for n in _written(op) if profile.storages[n].birth <= index):
            target = profile.storages[number]
            if op.phase == "forward" and target.pool != DEVICE_POOL and is_activation:
                away[number] = index
            elif op.phase == "backward" and target.pool == DEVICE_POOL and sources & away.keys():
                begins = next(away[n] for n in sources if n in away)
                operators += [begins, index]
                kept.append(Block(target.bytes, begins, index))
    return _Saving(
        "the script's own offload copies activations to the host and back, for",
        "remove it if that fits; else `torchtrim optimize` copies only what it must, while the "
        "device computes",
        tuple(operators),
        tuple(kept),
    )


def _read(op: Operator) -> set[int]:
    return {use.storage for use in op.inputs}


def _written(op: Operator) -> set[int]:
    return {use.storage for use in op.outputs} | set(op.mutates)


RULE = Rule(code="TT211", name="own-saving", check=check)
