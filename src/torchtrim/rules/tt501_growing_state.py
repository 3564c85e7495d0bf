"""A stream's state grows with every frame, so the stream ends when memory does.

## What it does

Lists each container (dict, list, deque, set, a function's cache) that grows from frame to frame and
never shrinks, each tensor that grows, and each growing autograd graph. The price is the bytes that a
frame adds, of tensors, counting each storage once, and of Python objects. The finding points to the
line that fills the container. `torchtrim stream-check` measures it; filling up to a bound is not
growth.

## Why is this bad?

A tracker that keeps data of every frame, or a model that keeps the keys and values of every
token, runs only as long as memory lasts. SAM 2 in transformers grows 16.75 MiB a frame at
1024x1024: a minute of video at 30 frames a second is 29 GiB. Most of it is never read again.

## Example

```python
session = processor.init_video_session(...)
for image in camera:
    masks = model(session, frame=image).pred_masks
```

## Use instead

```python
from torchtrim.stream import bound_session

session = processor.init_video_session(...)
bound_session(session, model)
for image in camera:
    masks = model(session, frame=image).pred_masks
```

For a model without an adapter, declare how long its caches are read:

```python
from torchtrim.stream import bound_caches, window

bound_caches(model, {"memory": window(6)})
```

`torchtrim.learn_state` finds windows that are long enough. If autograd's graph grows, run under
`torch.inference_mode()`, or keep `tensor.detach()`.

## Fix safety

`bound_session` and `bound_state` release entries that no later frame reads: results are equal bit
for bit, and reading a released entry raises `Evicted`. `sink_cache` computes another function once
its window is full, so use it only if you want that. Prove windows that you declare yourself:
`torchtrim verify --stream SCRIPT` runs the stream with and without them and names the first frame
that differs.

## References

* [Xiao et al., Efficient Streaming Language Models with Attention Sinks](https://arxiv.org/abs/2309.17453)
* [transformers: streaming video with SAM 2](https://huggingface.co/docs/transformers/model_doc/sam2_video)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchtrim.analysis.user_source import line_of_growth
from torchtrim.core.units import format_bytes
from torchtrim.records.commands import command
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Growth, Profile
from torchtrim.rules.base import Rule

_LINES = {
    "bound_session": (
        "from torchtrim.stream import bound_session; bound_session(session, model), once, before the first "
        "frame"
    ),
    "bound_state": (
        "from torchtrim.stream import bound_state; bound_state(inference_state, predictor), once, after "
        "init_state"
    ),
    "sink_cache": (
        "from torchtrim.stream import sink_cache; past_key_values=sink_cache(model, sinks=4, window=1024)"
        ", if tokens further back need not be seen"
    ),
}


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each growing container, tensor or graph; growth in a training step is TT210's."""
    if profile.operators:
        return
    for growth in profile.growths:
        line, inside = line_of_growth(profile, growth)
        exact = growth.adapter in _LINES and growth.adapter != "sink_cache"
        yield line.finding(
            RULE.code,
            _message(growth) + inside,
            _advice(growth),
            equivalence="BITWISE" if exact else None,
            count_per_step=max(round(growth.entries), 1),
            price_bytes=growth.bytes,
        )


def _message(growth: Growth) -> str:
    entries = f"{growth.entries:g} entr{'y' if growth.entries == 1 else 'ies'} and "
    what = "autograd's graph" if growth.kind == "graph" else f"{growth.kind} {growth.name}"
    more = f"{entries if growth.entries else ''}{format_bytes(growth.bytes)}"
    return f"{what} grows by {more} a frame"


def _advice(growth: Growth) -> str:
    if growth.adapter in _LINES:
        return _LINES[growth.adapter]
    if growth.kind == "graph":
        return (
            "a tensor that is kept from frame to frame still has its grad_fn: run the stream under "
            "torch.inference_mode(), or keep tensor.detach()"
        )
    if growth.kind == "lru_cache":
        return "functools.lru_cache(maxsize=16) in place of maxsize=None"
    if growth.kind == "tensor":
        return (
            "keep only the newest part, such as state = state[-n:].clone(), or its parts in a "
            'torchtrim.StateStore({"state": window(n)})'
        )
    name = next(iter(re.findall(r"[^\W\d]\w*", growth.name)[::-1]), "state")
    return (
        f'of a module: torchtrim.bound_caches(model, {{"{name}": window(n)}}); elsewhere '
        f'torchtrim.StateStore({{"{name}": window(n)}}) in its place. torchtrim.learn_state finds n, '
        f"`{command('verify', '--stream')}` proves it"
    )


RULE = Rule(code="TT501", name="state-grows", check=check)
