"""The program synchronizes with the device explicitly.

## What it does

Finds `torch.cuda.synchronize()`, `torch.accelerator.synchronize()`, and `synchronize()` of streams
and events, in a step. [The table of waits](../waits.md) has every case with its source.

## Why is this bad?

Each one lets the device run dry: the host queues new work only after the device has finished
everything. Around a timer it belongs in a benchmark, not in every step.

## Example

```python
torch.cuda.synchronize()
begin = time.perf_counter()
loss = step(batch)
torch.cuda.synchronize()
seconds = time.perf_counter() - begin
```

## Use instead

```python
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
loss = step(batch)
end.record()
timers.append((begin, end))
```

Read the timers many steps later, long after the events have happened.

## Fix safety

Results do not change, unless the wait guards a read: of a copy to the host with
`non_blocking=True`, of memory that another library or process reads, or of another stream's work.

## References

* [torch.cuda.synchronize](https://pytorch.org/docs/stable/generated/torch.cuda.synchronize.html)
* [CUDA semantics: asynchronous execution](https://pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution)
"""

from __future__ import annotations

from torchtrim.rules.base import waiting

RULE = waiting(__name__, "TT104", "explicit-wait")
