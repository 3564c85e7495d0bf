"""torch.compile compiles a function again in step after step, since a size or a number changes.

## What it does

Reports each function that was compiled in three or more of the steps watched with torch.compile on, with the
condition of its code that a call did not meet. Twice is not reported: the second time torch makes a symbol of
a size or a number that has changed, where it may. The price is the time of compiling in the steps after
the first, a step.

## Why is this bad?

Compiling takes seconds, a step milliseconds. After eight compiles
(`torch._dynamo.config.recompile_limit`) torch runs the function eagerly, which is slower, and can need more
memory.

## Example

```python
model = torch.compile(model, dynamic=False)
for tokens, labels in loader:  # of many lengths
    loss = criterion(model(tokens), labels)
```

## Use instead

```python
model = torch.compile(model, dynamic=True)
```

Or pad to a few lengths, or mark what changes with `torch._dynamo.mark_dynamic(tokens, 1)`. Make a number
that changes a tensor: `torch.tensor(0.9)` for a temperature, `AdamW(parameters, lr=torch.tensor(1e-3))` for a
learning rate.

## Fix safety

Code for sizes that are symbols may add in another order, and so round otherwise: `torchtrim verify` tells.
Only the steps watched are known: later ones may compile nothing again.

## References

* [torch.compile: dealing with recompilations](https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html)
* [torch.compile: dynamic shapes](https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchtrim.analysis.ranks import line_with
from torchtrim.analysis.user_source import CodeLine
from torchtrim.core.units import format_seconds
from torchtrim.records.finding import Finding
from torchtrim.records.profile import CompiledFunction, Profile
from torchtrim.rules.base import Rule

_SETTLED = 2
"""Compiles of a function whose sizes change: the second has symbols for them."""
_SIZE = re.compile(r"(size|stride) mismatch|\.(size|stride)\(\)")
_NUMBER = re.compile(r"(?P<what>\S+) == -?[\d.]+(e[+-]?\d+)?")


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each function that is compiled again and again."""
    for one in profile.compiled:
        if one.steps > _SETTLED:
            yield _finding(profile, one)


def _finding(profile: Profile, one: CompiledFunction) -> Finding:
    each = one.seconds / max(one.watched - 1, 1)
    because = f"; the guard that failed last: {one.guard}" if one.guard else ""
    what = f"`{one.function}`" if one.function else "the same module"
    place = CodeLine(one.path, one.line) if one.path else line_with(profile, "compile(")
    return place.finding(
        RULE.code,
        f"torch compiled {what} in {one.steps} of {one.watched} steps, "
        f"{format_seconds(each)} a step{because}",
        _advice(one.guard),
        price_ms=each * 1e3,
    )


def _advice(guard: str) -> str:
    if _SIZE.search(guard):
        return "compile with dynamic=True, once for all sizes, or pad to a few sizes"
    number = _NUMBER.fullmatch(guard)
    if number is not None and number["what"].endswith("['lr']"):
        return "give the optimizer its learning rate as a tensor, as in lr=torch.tensor(1e-3)"
    if number is not None:
        return f"make `{number['what']}` a tensor, as in torch.tensor(0.5), or compile with dynamic=True"
    return "keep what this condition names the same from call to call, or leave it out of what is compiled"


RULE = Rule(code="TT403", name="compiled-again", check=check)
