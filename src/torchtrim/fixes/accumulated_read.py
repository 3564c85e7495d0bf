"""`total += loss.item()` in a loop adds on the device, and reads once when the loop is over.

Each `.item()` waits until the device has computed the loss. The sum is kept in 64 bits on the device,
as Python keeps it, so that it is the same number: `total = total + loss.detach().double()`. Counts stay
integers. After the loop `total` is made a number of Python's again, and where the loop itself looks at
it, it is read there.

Types that were seen are tested for, which needs no sync; others are read as before. Holds for sums of
products too, `total += loss.item() * n`. Refused where somebody else may see `total` meanwhile: an attribute,
a name of a function within, a `try` that goes on. Divided by a number the device may round otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.deferred import (
    Computed,
    computed_of,
    gives_int,
    need_reads,
    on_device,
    widest_loop,
)
from torchtrim.rewriter.fix import Edit, Equivalence, Fix, Match, Writing
from torchtrim.rewriter.guarded import check_bound, names_tested, with_names
from torchtrim.rewriter.replace import check_comments, insert_after, torch_of
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.names import literal_stores
from torchtrim.source.reads import is_whole
from torchtrim.source.source import Loop, Source
from torchtrim.source.uses import loads, stores


def find(source: Source) -> Iterator[Match]:
    """Each `+=` and `-=` of reads in a loop."""
    return with_names(_find)(source)


def _find(source: Source) -> Iterator[Match]:
    for node in source.at({(ast.AugAssign, "")}):
        assert isinstance(node, ast.AugAssign)
        if not isinstance(node.op, ast.Add | ast.Sub) or source.loop(node) is None:
            continue
        if (computed := computed_of(node.value, source)) is not None:
            yield Match(fix=FIX, source=source, node=node, parts=computed.parts)


def write(match: Match, facts: Facts) -> Writing:
    """The sum on the device, and its reads."""
    node, source = match.node, match.source
    assert isinstance(node, ast.AugAssign)
    if not isinstance(node.target, ast.Name):
        raise Refused(
            f"`{source.segment(node.target)[:60]}` may be looked at by others before the loop is over. Add "
            "to a name of the function, and store its value once after the loop"
        )
    name = node.target.id
    loop = widest_loop(source, node, name)
    starts = _starts(match, node, loop)
    computed = computed_of(node.value, source)
    assert computed is not None
    need_reads(match, facts, computed)
    integral = gives_int(facts, computed) and int in starts
    if integral and float in starts:
        raise Refused(f"`{name}` begins as an integer in one place and as a float in another")
    return Writing(
        _edits(match, facts, loop, computed, integral, starts), equivalence=_grade(computed)
    )


def _grade(computed: Computed) -> Equivalence:
    return "BITWISE" if computed.exact else "ROUNDING"


def _starts(match: Match, node: ast.AugAssign, loop: Loop) -> set[type]:
    """The types that the sum begins with."""
    source = match.source
    assert isinstance(node.target, ast.Name)
    name, function = node.target.id, source.function(node)
    found = literal_stores(source, function, name)
    if not found:
        raise Refused(f"`{name}` does not begin as a number that is written there, such as 0.0")
    for store in stores(loop, name):
        outer = source.parents[store]
        if isinstance(outer, ast.AugAssign) and outer is not node:
            raise Refused(f"line {outer.lineno} changes `{name}` in the same loop")
    return {type(one.value) for one in found}


def _edits(
    match: Match,
    facts: Facts,
    loop: Loop,
    computed: Computed,
    integral: bool,
    starts: set[type],
) -> tuple[Edit, ...]:
    source, node = match.source, match.node
    assert isinstance(node, ast.AugAssign)
    assert isinstance(node.target, ast.Name)
    name = node.target.id
    torch, imports = torch_of(source)
    test, _, nodes = names_tested(match, facts, [f"L{n}" for n in range(len(computed.reads))])
    check_bound(match, nodes, node)
    read = f"{name}.item() if {torch}.is_tensor({name}) else {name}"
    plain = not test and (integral or starts == {float})
    if plain:
        read = f"{'int' if integral else 'float'}({name})"
    if plain and not test:
        imports = ()
    text = on_device(source, node.value, computed, facts, ".long()" if integral else ".double()")
    if test:
        text = f"({text} if {test} else {source.segment(node.value)})"
    elif not isinstance(node.value, ast.Call):
        text = f"({text})"
    sign = "+" if isinstance(node.op, ast.Add) else "-"
    edits = [Edit(source.start(node), source.end(node), f"{name} = {name} {sign} {text}"), *imports]
    used = list(loads(source.function(node), name))
    within = {id(one) for one in ast.walk(loop)}
    for use in used:
        if id(use) in within:
            if not is_whole(source, use):
                raise Refused(f"`{name}` is in a text in line {use.lineno}. Give it a name before")
            edits.append(Edit(source.start(use), source.end(use), read if plain else f"({read})"))
    if any(id(use) not in within for use in used) or isinstance(source.function(node), ast.Module):
        edits.append(insert_after(source, loop, f"{name} = {read}"))
    check_comments(source, edits)
    return tuple(edits)


FIX = Fix(codes=("TT101",), equivalence="ROUNDING", find=find, write=write)
