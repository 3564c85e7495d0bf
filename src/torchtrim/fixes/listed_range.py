"""`torch.tensor(list(range(n)), dtype=t, device=d)` becomes `torch.arange(n, dtype=t, device=d)`.

A list is made a tensor on the host and copied, and the host waits. The device counts itself.

Without a `dtype` an empty list has the type of floats and an empty range that of integers, so such a call is
changed only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as changed

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts
from torchtrim.source.source import Source
from torchtrim.source.uploads import need_device

_LISTS = ("range(N)", "list(range(N))", "[I for I in range(N)]")
_CALLS = {
    "torch.tensor({}, dtype=T, device=D)": "torch.arange(max(N, 0), dtype=T, device=D)",
    "torch.tensor({}, device=D, dtype=T)": "torch.arange(max(N, 0), dtype=T, device=D)",
    "torch.tensor({}, device=D)": "torch.arange(max(N, 0), device=D)",
    "torch.tensor({}).to(D)": "torch.arange(max(N, 0), device=D)",
    "torch.as_tensor({}, device=D)": "torch.arange(max(N, 0), device=D)",
}
_FORMS = {call.format(listed): template for call, template in _CALLS.items() for listed in _LISTS}
_TYPES = ("torch.int64", "torch.long", "torch.int32", "torch.int")


def find(source: Source) -> Iterator[Match]:
    """Ranges that become tensors. What is inside of a list is not watched with what is around it."""
    for match in of_forms(lambda: FIX, *_FORMS)(source):
        parts = {name: part for name, part in match.parts.items() if name != "I"}
        yield changed(match, parts=parts)


def write(match: Match, facts: Facts) -> Writing:
    """The range on the device."""
    facts.need(f"`{match.text('N')[:60]}` is an integer", lambda v: v.N.kind == "int")
    need_device(facts, match.text("D"))
    risk = ""
    if "T" not in match.parts:
        risk = "of an empty range it is of integers, and was of floats"
    elif match.source.dotted(match.parts["T"]) not in _TYPES:
        risk = "a type that cannot count so far rounds in another way"
    return Writing(replace(match, _FORMS[match.form]), risk=risk)


FIX: Fix = Fix(codes=("TT103",), equivalence="BITWISE", find=find, write=write)
