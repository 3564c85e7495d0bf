"""A stream's state grows with every frame, so the stream ends when memory does.

## What it does

Lists each container (dict, list, deque, set, a function's cache) that grows from frame to frame and
never shrinks, each tensor that grows, and what autograd's graph retains. The price is the bytes
that a frame adds, of tensors, counting each storage once, and of Python objects. The finding points
to the line that fills the container. `torchtrim stream-check` measures it; filling up to a bound is
not growth.

## Why is this bad?

A tracker that keeps something of every frame, or a model that keeps the keys and values of every
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

Of a model that has no adapter, declare how long its caches are read:

```python
from torchtrim.stream import bound_caches, window

bound_caches(model, {"memory": window(6)})
```

Which windows are long enough `torchtrim.learn_state` finds. Where autograd's graph grows, run under
`torch.inference_mode()`, or keep `tensor.detach()`.

## Fix safety

`bound_session` and `bound_state` release what no later frame reads: results are equal to the bit,
and reading a released entry raises `Evicted`. `sink_cache` computes another function once its
window is full, so use it only if you want that. Windows that you declare yourself are yours to
prove: `torchtrim verify --stream SCRIPT` runs the stream with and without them and names the first
frame that differs.

## References

* [Xiao et al., Efficient Streaming Language Models with Attention Sinks](https://arxiv.org/abs/2309.17453)
* [transformers: streaming video with SAM 2](https://huggingface.co/docs/transformers/model_doc/sam2_video)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Equivalence, Finding, Suggestion
from torchtrim.records.profile import Growth, Place, Profile
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
        filled, led = _place(profile, growth.place), _place(profile, growth.caller)
        place = led or filled
        yield Finding(
            code=RULE.code,
            path=place.path if place else profile.script,
            line=place.line if place else 0,
            end_line=place.line if place else 0,
            message=_message(growth, filled if led else None),
            count_per_step=max(round(growth.entries), 1),
            price_bytes=growth.bytes,
            fix=_fix(growth),
        )


def _place(profile: Profile, index: int) -> Place | None:
    return profile.places[index] if index >= 0 else None


def _message(growth: Growth, inside: Place | None) -> str:
    by = f" by {format_bytes(growth.bytes)} a frame"
    if growth.entries:
        entries = f"{growth.entries:g} entr{'y' if growth.entries == 1 else 'ies'}"
        by = f" by {entries} and {format_bytes(growth.bytes)} a frame"
    what = {
        "graph": "autograd's graph grows",
        "tensor": f"tensor {growth.name} grows",
    }.get(growth.kind, f"{growth.kind} {growth.name} grows")
    where = ""
    if inside is not None:
        file = inside.path.replace("\\", "/").rpartition("/")[2]
        where = f", filled at {file}:{inside.line} in {inside.function}"
    return f"{what}{by}{where}"


def _fix(growth: Growth) -> Suggestion:
    if growth.adapter in _LINES:
        equivalence: Equivalence | None = None if growth.adapter == "sink_cache" else "BITWISE"
        return Suggestion(kind="advice", equivalence=equivalence, reason=_LINES[growth.adapter])
    if growth.kind == "graph":
        reason = (
            "a tensor that is kept from frame to frame still has its grad_fn: run the stream under "
            "torch.inference_mode(), or keep tensor.detach()"
        )
        return Suggestion(kind="advice", reason=reason)
    if growth.kind == "lru_cache":
        return Suggestion(
            kind="advice", reason="functools.lru_cache(maxsize=16) in place of maxsize=None"
        )
    if growth.kind == "tensor":
        reason = (
            "keep only the newest part, such as state = state[-n:].clone(), or its parts in a "
            'torchtrim.StateStore({"state": window(n)})'
        )
        return Suggestion(kind="advice", reason=reason)
    name = next(iter(_IDENTIFIER.findall(growth.name)[::-1]), "state")
    return Suggestion(
        kind="advice",
        reason=f'of a module: torchtrim.bound_caches(model, {{"{name}": window(n)}}); elsewhere '
        f'torchtrim.StateStore({{"{name}": window(n)}}) in its place. torchtrim.learn_state finds n, '
        "torchtrim verify --stream proves it",
    )


_IDENTIFIER = re.compile(r"[^\W\d]\w*")
RULE = Rule(code="TT501", name="state-grows", check=check)
