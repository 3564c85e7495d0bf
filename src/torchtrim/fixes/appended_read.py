"""`losses.append(loss.item())` in a loop keeps the tensor, and reads all at once when the loop is over.

Each `.item()` waits until the device has computed the loss. Copies of the losses are kept on the device in
a list of their own; after the loop one `torch.stack(...).tolist()` reads them all and puts the numbers
into the same list.

Values computed from the numbers on the way count as real, as in the run that was watched.

Refused where somebody may look at the list before the loop is over: an attribute, a list that has another
name too, a use within the loop, a `try` that goes on.
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
from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import check_comments, fresh, insert_after, torch_of
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.names import assigned_to, only_reads
from torchtrim.source.source import Loop, Source
from torchtrim.source.uses import loads, stores


def find(source: Source) -> Iterator[Match]:
    """Each `x.append(...)` of reads in a loop, that is a statement."""
    for node in source.at({(ast.Call, "append")}):
        assert isinstance(node, ast.Call)
        statement = source.parents[node]
        if (
            isinstance(node.func, ast.Attribute)
            and len(node.args) == 1
            and not node.keywords
            and isinstance(statement, ast.Expr)
            and source.loop(node) is not None
            and (computed := computed_of(node.args[0], source)) is not None
        ):
            yield Match(fix=FIX, source=source, node=node, parts=computed.parts)


def write(match: Match, facts: Facts) -> Writing:
    """Tensors in a list of their own, and one read of them."""
    node, source = match.node, match.source
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    target = node.func.value
    if not isinstance(target, ast.Name):
        raise Refused(
            f"`{source.segment(target)[:60]}` may be looked at by others before the loop is over. Append to "
            "a list of the function, and store it once after the loop"
        )
    statement = source.statement(node)
    loop = widest_loop(source, statement, target.id)
    _check_list(source, target, loop)
    computed = computed_of(node.args[0], source)
    assert computed is not None
    need_reads(match, facts, computed)
    for number in range(len(computed.reads)):
        facts.only("the type", lambda v, n=number: getattr(v, f"L{n}").dtype, "")  # type: ignore[misc]
    return Writing(
        _edits(match, facts, computed, loop),
        equivalence="BITWISE" if computed.exact else "ROUNDING",
    )


def _check_list(source: Source, target: ast.Name, loop: Loop) -> None:
    """The list must be the function's own, and nobody may see it before the loop is over."""
    name, function = target.id, source.function(target)
    for store in stores(function, name):
        made = assigned_to(source, store)
        if made is None or not _is_list(made) or _is_shared(source, store):
            raise Refused(f"`{name}` is not made there as a list, so others may have it too")
        if any(store is one for one in ast.walk(loop)):
            raise Refused(f"`{name}` begins anew in the same loop")
    if not list(stores(function, name)):
        raise Refused(f"`{name}` is not made in this function, so others may see it")
    within = {id(one) for one in ast.walk(loop)}
    outer = {id(one) for around in _loops(source, loop) for one in ast.walk(around)}
    for use in loads(function, name):
        if use is target:
            continue
        if id(use) in within:
            raise Refused(f"line {use.lineno} uses `{name}` before the loop is over")
        if (id(use) in outer or use.lineno < loop.lineno) and not _is_looked_at(source, use):
            raise Refused(
                f"line {use.lineno} may keep `{name}`, and see it before the loop is over"
            )


def _loops(source: Source, loop: Loop) -> Iterator[Loop]:
    while (outer := source.loop(loop)) is not None:
        yield outer
        loop = outer


def _is_shared(source: Source, store: ast.Name) -> bool:
    assign = source.parents[store]
    return isinstance(assign, ast.Assign) and len(assign.targets) > 1


def _is_looked_at(source: Source, use: ast.Name) -> bool:
    outer = source.parents[use]
    if isinstance(outer, ast.Subscript):
        return outer.value is use and isinstance(outer.ctx, ast.Load)
    return only_reads(source, use)


def _is_list(node: ast.expr) -> bool:
    named = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "list"
    )
    return isinstance(node, ast.List) or named


def _edits(match: Match, facts: Facts, computed: Computed, loop: Loop) -> tuple[Edit, ...]:
    source, node = match.source, match.node
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Attribute)
    name = source.segment(node.func.value)
    torch, imports = torch_of(source)
    pending = fresh(source, node, f"{name}_read_later")
    blanks = source.indentation(loop)
    if blanks is None:
        raise Refused("the loop shares its line with another statement. Give each its own line")
    text = on_device(source, node.args[0], computed, facts, _cast(facts, computed, node.args[0]))
    if not facts.holds(lambda v: not v.L0.shape):
        text = f"({text}).reshape(())"
    at = source.line_start(loop.lineno)
    after = f"if {pending}:\n    {name}.extend({torch}.stack({pending}).tolist())"
    edits = (
        Edit(at, at, f"{blanks}{pending} = []{source.newline}"),
        Edit(source.start(node), source.end(node), f"{pending}.append({text})"),
        insert_after(source, loop, after),
        *imports,
    )
    check_comments(source, edits)
    return edits


def _cast(facts: Facts, computed: Computed, node: ast.expr) -> str:
    """What makes the tensor the number that would have been read: its own type, or 64 bits."""
    alone = computed.reads[0].node is node
    if alone and computed.reads[0].cast == "":
        return ".clone()"
    if alone and computed.reads[0].cast == "float":
        return ".double().clone()"
    return ".long()" if gives_int(facts, computed) else ".double()"


FIX = Fix(codes=("TT101",), equivalence="ROUNDING", find=find, write=write)
