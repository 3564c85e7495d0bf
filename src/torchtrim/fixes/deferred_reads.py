"""Reads in a loop whose numbers are not needed before it ends: they are deferred until then."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torchtrim.rewriter.fix import Equivalence, Fix, Match, TextEdit, Writing
from torchtrim.rewriter.reads import (
    Computed,
    computed_of,
    gives_int,
    need_reads,
    on_device,
    risk_of,
    together,
    widest_loop,
)
from torchtrim.rewriter.replace import (
    above,
    deleted,
    fresh,
    insert_after,
    torch_of,
)
from torchtrim.source.facts import Facts, FixRefused, of_part
from torchtrim.source.names import (
    assigned_name,
    assigned_to,
    assignment_before,
    is_private,
    lifetime,
    literal_stores,
    loads,
    only_reads,
    stores,
)
from torchtrim.source.nodes import (
    called,
    constant_of,
    function_of,
    method_of,
    name_set,
    receiver,
)
from torchtrim.source.operations import is_fresh
from torchtrim.source.source import Function, Loop, SourceFile, spot, within
from torchtrim.source.transfers import has_own_text


def _match(fix: Fix, source: SourceFile, node: ast.AST, value: ast.expr) -> Iterator[Match]:
    """Yield the match of a node in a loop whose value is computed from reads."""
    if source.loop(node) is not None and (computed := computed_of(value, source)):
        yield Match(fix=fix, source=source, node=node, parts=computed.parts)


def _needed(match: Match, facts: Facts, value: ast.expr) -> Computed:
    """Return the reads and numbers of the value, after requiring what they need."""
    computed = computed_of(value, match.source)
    assert computed is not None
    need_reads(match, facts, computed)
    return computed


def _grade(computed: Computed) -> Equivalence:
    return "BITWISE" if computed.exact else "ROUNDING"


def _sums(source: SourceFile) -> Iterator[Match]:
    """Yield one match for all sums in a loop that change the same name."""
    done: set[ast.AST] = set()
    for node in source.each(ast.AugAssign):
        if node in done or source.loop(node) is None or not _computed(source, node):
            continue
        same, computed = _same(source, node)
        done |= set(same)
        yield Match(
            fix=ACCUMULATED_READ,
            source=source,
            node=node,
            parts=computed.parts,
            syncs=tuple(read.node for read in computed.reads),
        )


def _computed(source: SourceFile, node: ast.AST) -> Computed | None:
    if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    return computed_of(node.value, source)


def _same(source: SourceFile, node: ast.AugAssign) -> tuple[list[ast.AugAssign], Computed]:
    """Return the sums of reads in the innermost loop that change the name that a node does, as one."""
    loop = source.loop(node)
    name = node.target.id if isinstance(node.target, ast.Name) else ""
    outer = [source.parents[store] for store in (stores(loop, name) if loop is not None else ())]
    every = [one for one in outer if isinstance(one, ast.AugAssign)]
    if not every or not all(_computed(source, one) for one in every):
        every = [node]
    return every, together(filter(None, (_computed(source, one) for one in every)))


def _added(match: Match, facts: Facts) -> Writing:
    node, source = match.node_as(ast.AugAssign), match.source
    if not isinstance(node.target, ast.Name):
        raise FixRefused(
            f"`{source.segment(node.target)[:60]}` may be read by other code before the loop ends. Add "
            "to a local name, and store its value once after the loop"
        )
    name = node.target.id
    loop = widest_loop(source, node, name)
    starts = _starts(source, node, name, loop)
    computed = _same(source, node)[1]
    need_reads(match, facts, computed)
    integral = gives_int(facts, computed) and int in starts
    if integral and float in starts:
        raise FixRefused(f"`{name}` starts as an integer in one place and as a float in another")
    edits = _sum_edits(
        match, facts, loop, computed, integral=integral, float_only=starts == {float}
    )
    return Writing(edits, risk_of(computed), equivalence=_grade(computed))


def _starts(source: SourceFile, node: ast.AugAssign, name: str, loop: Loop) -> set[type]:
    if not (literals := literal_stores(source, lifetime(source, node, name), name)):
        raise FixRefused(f"`{name}` does not start as a literal number such as 0.0")
    own = _same(source, node)[0]
    for store in stores(loop, name):
        outer = source.parents[store]
        if isinstance(outer, ast.AugAssign) and outer not in own:
            raise FixRefused(f"line {outer.lineno} changes `{name}` in the same loop")
    return {type(literal.value) for literal in literals}


def _sum_edits(
    match: Match, facts: Facts, loop: Loop, computed: Computed, *, integral: bool, float_only: bool
) -> tuple[TextEdit, ...]:
    source, node = match.source, match.node_as(ast.AugAssign)
    assert isinstance(node.target, ast.Name)
    name = node.target.id
    torch, imports = torch_of(source)
    read = f"{name}.item() if {torch}.is_tensor({name}) else {name}"
    plain = integral or float_only or _is_only_divided(source, node, loop)
    if plain:
        read, imports = f"{'int' if integral else 'float'}({name})", ()
    cast = ".long()" if integral else ".double()"
    grows = plain and (not facts.seen or _are_flat(facts, computed))
    edits = [
        _sum(source, one, on_device(source, one.value, computed, facts, cast), grows=grows)
        for one in _same(source, node)[0]
    ]
    if grows:
        return (*edits, *_plain_reads(source, node, loop, read))
    edits += imports
    inner, every = loads(loop, name), loads(lifetime(source, node, name), name)
    for use in inner:
        _need_own_text(source, use)
        edits.append(TextEdit.of(source, use, read if plain else f"({read})"))
    if len(inner) < len(every) or isinstance(source.function(node), ast.Module):
        edits.append(insert_after(source, loop, f"{name} = {read}"))
    return tuple(edits)


def _sum(source: SourceFile, node: ast.AugAssign, text: str, *, grows: bool) -> TextEdit:
    """Return the edit of one sum; unless it `grows` in place, its name gets a new tensor."""
    name, sign = source.segment(node.target), "+" if isinstance(node.op, ast.Add) else "-"
    if grows:
        return TextEdit.of(source, node, f"{name} {sign}= {text}")
    text = text if isinstance(node.value, ast.Call) else f"({text})"
    return TextEdit.of(source, node, f"{name} = {name} {sign} {text}")


def _are_flat(facts: Facts, computed: Computed) -> bool:
    """Return True if all tensors read have zero dimensions, so that a sum of them can grow in place."""
    parts = [f"L{n}" for n in range(len(computed.reads))]
    return facts.holds(lambda v: not any(getattr(v, part).shape for part in parts))


_FEW = 2
"""Reads after a loop that are written in place. Arbitrary: one more line is shorter than three."""


def _is_only_divided(source: SourceFile, node: ast.AugAssign, loop: Loop) -> bool:
    """Return True if each use of the sum that may still be its initial integer makes it a float."""
    assert isinstance(node.target, ast.Name)
    name, function = node.target.id, source.function(node)
    every = loads(lifetime(source, node, name), name)
    uses = [use for use in every if not _is_summed(source, use, node, loop)]
    outer = [source.parents[use] for use in uses]
    divided = (
        function_of(one) == "float"
        or source.dotted(getattr(one, "func", one)) == "math.sqrt"
        or (isinstance(one, ast.BinOp) and one.left is use and _gives_float(one))
        for one, use in zip(outer, uses, strict=True)
    )
    return not isinstance(function, ast.Module) and len(outer) <= _FEW and all(divided)


def _gives_float(node: ast.BinOp) -> bool:
    """Return True if an integer on the left becomes a float: divided, or to the power of one."""
    power = isinstance(node.op, ast.Pow) and isinstance(constant_of(node.right), float)
    return power or isinstance(node.op, ast.Div)


def _plain_reads(
    source: SourceFile, node: ast.AugAssign, loop: Loop, read: str
) -> Iterator[TextEdit]:
    """Yield the edits that read the sum where its number is used: in the loop, and after it."""
    assert isinstance(node.target, ast.Name)
    name, function = node.target.id, source.function(node)
    inner = loads(loop, name)
    outer = [use for use in loads(lifetime(source, node, name), name) if use not in inner]
    alone = isinstance(function, ast.Module)
    if alone or len(outer) > _FEW or not all(has_own_text(source, use) for use in outer):
        yield insert_after(source, loop, f"{name} = {read}")
        outer = []
    for use in (*inner, *outer):
        _need_own_text(source, use)
        if function_of(source.parents[use]) == "float":
            continue
        summed = _is_summed(source, use, node, loop)
        yield TextEdit.of(source, use, f"{name}.item()" if summed else read)


def _is_summed(source: SourceFile, use: ast.Name, node: ast.AugAssign, loop: Loop) -> bool:
    """Return True if a use runs only after the one sum in the same iteration, with no other value in
    between."""
    block = source.block(node)
    if not any(within(use, later) for later in block[block.index(node) + 1 :]):
        return False
    others = [store for store in stores(loop, use.id) if source.parents[store] is not node]
    if any(isinstance(source.parents[store], ast.AugAssign) for store in others):
        return False
    repeated = source.loop(use) is not source.loop(node)
    between = range(source.end(node), source.start(use))
    return not any(repeated or source.start(store) in between for store in others)


def _need_own_text(source: SourceFile, use: ast.Name) -> None:
    if not has_own_text(source, use):
        raise FixRefused(
            f"`{use.id}` is inside an f-string in line {use.lineno}. Assign it to a name first"
        )


ACCUMULATED_READ: Fix = Fix(
    name="accumulated_read",
    doc="""`total += loss.item()` in a loop adds on the device, and reads once when the loop ends.

    Each `.item()` waits until the device has computed the loss. The device keeps the sum in 64 bits, as
    Python does, so it is the same number: `total += loss.detach().double()`. Counts stay integers. The sum is
    read where its number is used: `print(total.item())` in the loop, `float(total)` after it.

    Also applies to sums of products and powers, `total += norm.item() ** 2`, and to several sums of one name.
    If the sum contains a power, or a division by a number, the device may round differently. An exponent
    other than a small positive integer needs `--unsafe-fixes`: where Python gives a complex number or an
    error, the device gives NaN or infinity.

    Refused if other code may see `total` in the meantime: an attribute, a name of an inner function, a `try`
    that continues.
    """,
    codes=("TT101",),
    equivalence="ROUNDING",
    find=_sums,
    write=_added,
)


def _appends(source: SourceFile) -> Iterator[Match]:
    for node in source.calls("append"):
        alone = isinstance(source.parents[node], ast.Expr) and isinstance(node.func, ast.Attribute)
        if alone and len(node.args) == 1 and not node.keywords:
            assign = _assigned_just_before(source, node.args[0])
            value = node.args[0] if assign is None else assign.value
            for match in _match(APPENDED_READ, source, node, value):
                yield replace(match, begin=assign)


def _assigned_just_before(source: SourceFile, node: ast.expr) -> ast.Assign | None:
    """Return the statement before, if it assigns a name that is used nowhere else."""
    if not isinstance(node, ast.Name):
        return None
    function, block = source.function(node), source.block(source.statement(node))
    assign = block[block.index(source.statement(node)) - 1]
    alone = len(loads(function, node.id)) == len(stores(function, node.id)) == 1
    own = alone and is_private(source, function, node.id) and isinstance(function, Function)
    named = isinstance(assign, ast.Assign) and assigned_name(assign) == node.id
    return assign if own and named and isinstance(assign, ast.Assign) else None


def _kept(match: Match, facts: Facts) -> Writing:
    node, source = match.node_as(ast.Call), match.source
    assert isinstance(node.func, ast.Attribute)
    target = node.func.value
    if not isinstance(target, ast.Name):
        raise FixRefused(
            f"`{source.segment(target)[:60]}` may be read by other code before the loop ends. Append to "
            "a local list, and store it once after the loop"
        )
    loop = widest_loop(source, source.statement(node), target.id)
    value = match.begin.value if isinstance(match.begin, ast.Assign) else node.args[0]
    report = _report(source, target, loop)
    _check_list(source, target, loop, report)
    computed = _needed(match, facts, value)
    for number in range(len(computed.reads)):
        facts.only("the type", of_part(f"L{number}", lambda seen: seen.dtype), "")
    text = on_device(source, value, computed, facts, _cast(facts, computed, value))
    if _is_new_each_time(source, computed.reads[0].tensor):
        text = text.removesuffix(".clone()")
    flat = "" if facts.holds(lambda v: not v.L0.shape) else ".flatten()"
    edits = _list_edits(match, text, f"{flat}.tolist()", loop, report)
    if isinstance(match.begin, ast.Assign):
        edits = (*edits, deleted(source, match.begin))
    return Writing(edits, risk_of(computed), equivalence=_grade(computed))


_TRAINING = name_set("backward manual_backward scale scale_loss")
"""Methods of tensors, loss scalers and trainers that get a loss and do not write to it."""
_SUMMARIES = name_set("sum len max min mean average std median")


class _Report(NamedTuple):
    """An `if` in a loop that computes numbers from a list, and clears it afterwards, or never."""

    branch: ast.If
    reads: list[ast.Name]
    clears: bool


def _report(source: SourceFile, target: ast.Name, loop: Loop) -> _Report | None:
    """Return the only other code that uses a list, if it is such an `if` after the append, and no element was
    in the list before the loop."""
    function, statement = source.function(target), source.statement(target)
    uses = {use for use in loads(function, target.id) if use is not target}
    block = source.block(statement)
    later = block[block.index(statement) + 1 :]
    branch = next((one for one in later if isinstance(one, ast.If) and loads(one, target.id)), None)
    tried = any(isinstance(one, ast.Try) and within(one, loop) for one in source.around(statement))
    starts = all(_is_empty(source, one) for one in stores(function, target.id))
    if branch is None or tried or not starts:
        return None
    inside = sorted((use for one in branch.body for use in loads(one, target.id)), key=spot)
    reads = [use for use in inside if _is_summarized(source, use)]
    cleared = [one for one in branch.body if _clears(one, target.id)]
    known = {*reads, *(use for one in cleared for use in loads(one, target.id))}
    reset = [store for one in cleared for store in stores(one, target.id)]
    alone = known == uses and list(stores(loop, target.id)) == reset and len(cleared) < 2
    if not reads or not alone or any(spot(one) < spot(reads[-1]) for one in cleared):
        return None
    return _Report(branch, reads, bool(cleared))


def _is_empty(source: SourceFile, store: ast.Name) -> bool:
    """Return True if a name gets an empty list."""
    value = assigned_to(source, store)
    made = isinstance(value, ast.Call) and function_of(value) == "list" and not value.args
    return made or (isinstance(value, ast.List) and not value.elts)


def _clears(statement: ast.stmt, name: str) -> bool:
    """Return True for `name.clear()` and `name = []`."""
    if isinstance(statement, ast.Expr):
        cleared = receiver(statement.value, ("clear",))
        return isinstance(cleared, ast.Name) and cleared.id == name
    return assigned_name(statement) == name


def _is_summarized(source: SourceFile, use: ast.Name) -> bool:
    """Return True if numpy, the standard library or a builtin computes a number from the list."""
    call = source.parents[use]
    if not isinstance(call, ast.Call) or call.args != [use] or call.keywords:
        return False
    module = (source.dotted(call.func) or "").partition(".")[0]
    known = function_of(call) or module in ("numpy", "statistics")
    return bool(known) and called(call.func) in _SUMMARIES


def _is_new_each_time(source: SourceFile, tensor: ast.expr) -> bool:
    """Return True if each iteration makes a new tensor, which is only computed with or trained by."""
    if is_fresh(tensor, source):
        return True
    if not isinstance(tensor, ast.Name):
        return False
    function, loop = source.function(tensor), source.loop(tensor)
    for use in loads(function, tensor.id):
        outer = source.parents[use]
        call = source.parents[outer] if isinstance(outer, ast.Attribute) else outer
        if method_of(call) not in _TRAINING and not only_reads(source, use):
            return False
    bound = stores(function, tensor.id)
    made = (isinstance(source.parents[one], ast.Assign | ast.Tuple) for one in bound)
    values = [getattr(source.statement(one), "value", None) for one in bound]
    each = all(made) and all(isinstance(one, ast.Call | ast.BinOp) for one in values)
    return each and loop is not None and bool(stores(loop, tensor.id))


def _list_edits(
    match: Match, text: str, read: str, loop: Loop, report: _Report | None
) -> tuple[TextEdit, ...]:
    """Return the edits that keep tensors in the list, or in one beside it, and read them where it is used."""
    source, node = match.source, match.node_as(ast.Call)
    assert isinstance(node.func, ast.Attribute)
    name = source.segment(node.func.value)
    torch, imports = torch_of(source)
    stacked = f"{torch}.stack({name}){read}"
    if report is not None:
        first = next(one for one in report.branch.body if within(report.reads[0], one))
        kept = name if report.clears else fresh(source, node, f"{name}_read")
        changed = [] if report.clears else [TextEdit.of(source, u, kept) for u in report.reads]
        where = [above(source, first, f"{kept} = {stacked}"), *changed]
    elif _starts_before(source, name, loop):
        where = [insert_after(source, loop, f"if {name}:\n    {name} = {stacked}")]
    else:
        pending = fresh(source, node, f"{name}_read_later")
        stacked = f"{torch}.stack({pending}){read}"
        return (
            above(source, loop, f"{pending} = []"),
            TextEdit.of(source, node, f"{pending}.append({text})"),
            insert_after(source, loop, f"if {pending}:\n    {name}.extend({stacked})"),
            *imports,
        )
    return (TextEdit.of(source, node.args[0], text), *where, *imports)


def _starts_before(source: SourceFile, name: str, loop: Loop) -> bool:
    """Return True if the list is empty whenever the loop starts, and no code has another name for it."""
    assign = assignment_before(source, name, loop)
    if assign is None or source.loop(assign) is not source.loop(loop):
        return False
    target = assign.targets[0]
    between = range(assign.lineno + 1, loop.lineno)
    used = any(use.lineno in between for use in loads(source.function(loop), name))
    return isinstance(target, ast.Name) and _is_empty(source, target) and not used


def _check_list(source: SourceFile, target: ast.Name, loop: Loop, report: _Report | None) -> None:
    """Raise `FixRefused` unless the list is the function's own and unused until the loop ends."""
    name = target.id
    function = lifetime(source, source.statement(target), name)
    for store in stores(function, name):
        assign, value = source.parents[store], assigned_to(source, store)
        shared = isinstance(assign, ast.Assign) and len(assign.targets) > 1
        listed = value and (isinstance(value, ast.List) or function_of(value) == "list")
        if not listed or shared:
            raise FixRefused(f"`{name}` is not created as a list there, so it may have an alias")
        if store in stores(loop, name) and report is None:
            raise FixRefused(f"`{name}` is reset in the same loop")
    if not stores(function, name):
        raise FixRefused(f"`{name}` is not created in this function, so other code may see it")
    for use in loads(function, name):
        if use is target or report is not None:
            continue
        if use in loads(loop, name):
            raise FixRefused(f"line {use.lineno} uses `{name}` before the loop ends")
        repeated = any(use in loads(outer, name) for outer in source.loops(loop))
        early = use.lineno < loop.lineno or repeated
        around = source.parents[use]
        if isinstance(around, ast.Subscript):
            read = around.value is use and isinstance(around.ctx, ast.Load)
        else:
            read = only_reads(source, use)
        if early and not read:
            raise FixRefused(
                f"line {use.lineno} may keep `{name}`, and see it before the loop ends"
            )


def _cast(facts: Facts, computed: Computed, node: ast.expr) -> str:
    """Return the conversion that makes the tensor's number equal the read one: none, or to 64 bits."""
    read = computed.reads[0]
    if read.node is node and read.cast in ("", "float"):
        return ".double().clone()" if read.cast else ".clone()"
    return ".long()" if gives_int(facts, computed) else ".double()"


APPENDED_READ: Fix = Fix(
    name="appended_read",
    doc="""`losses.append(loss.item())` in a loop keeps the tensor, and reads all of them when the loop ends.

    Each `.item()` waits until the device has computed the loss. The list keeps the losses themselves, or
    copies if they may be written to, and after the loop one `torch.stack(...).tolist()` reads all of them.
    Where an `if` in the loop computes a mean or sum of the list, as every hundred steps, they are read there.
    A list that is not empty before keeps its numbers, and the losses are in a second list.

    Values computed from the numbers are assumed to be real numbers, as in the observed run.

    Refused if other code may see the list before the loop ends: an attribute, a list with another alias, a
    use inside the loop, a `try` that continues.
    """,
    codes=("TT101",),
    equivalence="ROUNDING",
    find=_appends,
    write=_kept,
)


FIXES = (ACCUMULATED_READ, APPENDED_READ)
