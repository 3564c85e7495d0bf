"""`torch.tensor([0.0 for _ in range(n)], device=d)` becomes `torch.full([n], 0.0, device=d)`.

A list is made a tensor on the host and copied, and the host waits. The device fills one itself.

Needs a number that is written there, of floats or with a `dtype`: an empty list has the type of floats.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace as changed

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.forms import match_form
from torchtrim.source.source import Source
from torchtrim.source.uploads import need_device

_LISTS = ("[C for I in range(N)]", "N * [C]")
_FORMS = {
    form.format(listed): template
    for listed in _LISTS
    for form, template in (
        ("torch.tensor({}, dtype=T, device=D)", "torch.full([max(N, 0)], C, dtype=T, device=D)"),
        ("torch.tensor({}, device=D, dtype=T)", "torch.full([max(N, 0)], C, dtype=T, device=D)"),
        ("torch.tensor({}, device=D)", "torch.full([max(N, 0)], C, device=D)"),
        ("torch.tensor({}).to(D)", "torch.full([max(N, 0)], C, device=D)"),
    )
}


def find(source: Source) -> Iterator[Match]:
    """Lists of one number that become tensors; what is inside of a list is not watched with the rest."""
    for match in of_forms(lambda: FIX, *_FORMS)(source):
        parts = {name: part for name, part in match.parts.items() if name in "NDT"}
        yield changed(match, parts=parts)


def write(match: Match, facts: Facts) -> Writing:
    """The tensor filled on the device."""
    bound = match_form(match.form, match.node, match.source)
    assert bound is not None
    number = bound.parts["C"]
    value = number.value if isinstance(number, ast.Constant) else None
    if type(value) not in (int, float) or not abs(value) < 2**15:  # type: ignore[arg-type]
        raise Refused("the repeated value is not a small number that is written there")
    if "T" not in match.parts and not isinstance(value, float):
        raise Refused("an empty list would be of floats: give `dtype`")
    facts.need(f"`{match.text('N')[:60]}` is an integer", lambda v: v.N.kind == "int")
    need_device(facts, match.text("D"))
    text = match.source.segment(number)
    return Writing(replace(match, _FORMS[match.form].replace("C", text, 1)))


FIX: Fix = Fix(codes=("TT103",), equivalence="BITWISE", find=find, write=write)
