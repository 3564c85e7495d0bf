"""A tensor is used while a copy into it or out of it may still be under way.

## What it does

Finds a copy from the device to the host with `non_blocking=True` whose result is read before an
event, a stream or the device was waited for; a pinned tensor that is written to while it is being
copied to the device; and a tensor that a line makes in ordinary memory only to copy it with
`non_blocking=True`, which frees the memory at once. A wait of any kind on the copy's stream ends
the danger, also one that the program did not mean for it.

With `--streams`, on an emulated device, also each line that uses on one stream what another has not
finished: reads what it writes, writes over what it reads, or lets memory go while it is in use. Then
the streams do their work in the order that was asked for (`early`, `late`, `random:SEED`), so that a
wrong value shows on a CPU.

## Why is this bad?

Nothing fails: now and then the numbers are those of the step before, or zeros. Such a bug was in
Lightning's moving of predictions (wrong zeros), in torchmetrics' safe division (a source freed too
early; wrong on Apple's devices, without any gain on CUDA) and in SGLang's scheduler.

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

Where nothing useful happens in between, a plain `.cpu()` is as fast, and safe. A constant is made
on the device: `torch.full((), value, device=device)`.

## Fix safety

To wait is always safe. This is a finding about correctness, so it has no price.

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
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.syncs.lookup import row


def check(profile: Profile) -> Iterator[Finding]:
    """One finding for each line that uses what may still be copied."""
    for line, syncs in waits_by_line(profile, RULE.code).items():
        ways = " and ".join(Counter(row(sync.row).what for sync in syncs))
        yield Finding(
            code=RULE.code,
            path=line.path,
            line=line.line,
            end_line=line.line,
            message=f"{ways}, {times(len(syncs))} a step: the values may be wrong",
            count_per_step=len(syncs),
            source="modelled",
            fix=Suggestion(kind="advice", reason=advice(profile, syncs)),
        )


RULE = Rule(code="TT105", name="unsynchronized-copy", check=check)
