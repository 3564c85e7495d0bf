"""A tensor is used while a copy into it or out of it may still be in progress.

## What it does

Finds a copy from the device to the host with `non_blocking=True` whose result is read before the
program waits for an event, a stream or the device; a pinned tensor that is written to while it is
being copied to the device; and a temporary in ordinary memory that is copied with
`non_blocking=True` and freed at once. Any wait on the copy's stream ends the danger, whatever its
reason.

With `--streams`, on an emulated device, it also finds each line that uses on one stream what
another has not finished: it reads what the other writes, overwrites what the other reads, or frees
memory that is in use. The streams then work in the requested order (`early`, `late`,
`random:SEED`), so that a wrong value shows on a CPU.

## Why is this bad?

Nothing fails: now and then the numbers come from the previous step, or are zeros. Lightning had such
a bug when it moved predictions (wrong zeros), torchmetrics in its safe division (a source freed too
early; wrong on Apple's devices, without any gain on CUDA), and SGLang in its scheduler.

## Example

```python
predictions = model(batch).to("cpu", non_blocking=True)
results.append(predictions.numpy())
```

## Use instead

```python
predictions = model(batch).to("cpu", non_blocking=True)
arrived = torch.cuda.Event()
arrived.record()
...
arrived.synchronize()
results.append(predictions.numpy())
```

If there is nothing useful to do in between, a plain `.cpu()` is as fast, and safe. Create constants
on the device: `torch.full((), value, device=device)`.

## Fix safety

Waiting is always safe. This finding is about correctness, so it has no price.

## References

* [A guide on good usage of non_blocking and pin_memory()](https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html)
* [Lightning #11288](https://github.com/Lightning-AI/pytorch-lightning/pull/11288),
  [torchmetrics #3095](https://github.com/Lightning-AI/torchmetrics/issues/3095),
  [SGLang #16493](https://github.com/sgl-project/sglang/pull/16493)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torchtrim.analysis.syncs import advice, times, waits_by_line
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.syncs.lookup import row


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each line that uses a tensor that may still be copied."""
    for line, syncs in waits_by_line(profile, RULE.code).items():
        ways = " and ".join(Counter(row(sync.row).what for sync in syncs))
        yield line.finding(
            RULE.code,
            f"{ways}, {times(len(syncs))} a step: the values may be wrong",
            advice(profile, syncs),
            count_per_step=len(syncs),
            source="modelled",
        )


RULE = Rule(code="TT105", name="unsynchronized-copy", check=check)
