"""`meter.update(loss.item(), n)` gives the meter the tensor, which is read where its numbers are used.

Each `.item()` waits until the device has computed the loss. A meter such as `AverageMeter` only adds,
multiplies and divides what it gets, so the device can do that, in 64 bits, as Python does:
`meter.update(loss.detach().double(), n)`. A meter's number in an f-string reads its tensor there; elsewhere
it is read by `float`.

The meter's class has to be in the project: its method may only compute with the number, and store it in
attributes. A device divides by a Python number as a multiplication by its reciprocal, so an average may
differ in its last bit.

Refused if other code gets the meter, which would see tensors, and for integers, which an f-string shows
otherwise than floats.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.reads import computed_of, need_reads, on_device
from torchtrim.source.classes import class_of
from torchtrim.source.facts import Facts, FixRefused, is_floating, of_part
from torchtrim.source.names import assigned_to, is_private, loads, stores
from torchtrim.source.nodes import constant_of, find_all, keywords_of
from torchtrim.source.source import SourceFile
from torchtrim.source.transfers import has_own_text

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)


class _Update(NamedTuple):
    """A call of a meter's method, the meter's name and class, and the argument that is read."""

    call: ast.Call
    meter: ast.Name
    kind: ast.ClassDef
    given: ast.expr
    method: ast.FunctionDef
    parameter: str


def _find(source: SourceFile) -> Iterator[Match]:
    for statement in source.each(ast.Expr):
        if found := _update(source, statement.value):
            computed = computed_of(found.given, source)
            assert computed is not None
            yield Match(fix=FIX, source=source, node=found.call, parts=computed.parts)


def _update(source: SourceFile, call: ast.AST) -> _Update | None:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    meter, name = call.func.value, call.func.attr
    words = keywords_of(call)
    given = [*call.args, *words.values()]
    read = [value for value in given if computed_of(value, source)]
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    if not isinstance(meter, ast.Name) or starred or len(read) != 1 or source.loop(call) is None:
        return None
    made = [assigned_to(source, one) for one in stores(source.function(call), meter.id)]
    kinds = {class_of(one.func, source) if isinstance(one, ast.Call) else None for one in made}
    kind = kinds.pop() if len(kinds) == 1 else None
    methods = [one for one in kind.body if getattr(one, "name", "") == name] if kind else []
    if kind is None or len(methods) != 1 or not isinstance(methods[0], ast.FunctionDef):
        return None
    parameters = [one.arg for one in methods[0].args.args[1:]]
    at = given.index(read[0])
    named = [*parameters[: len(call.args)], *words][at : at + 1]
    if not named or named[0] not in parameters:
        return None
    return _Update(call, meter, kind, read[0], methods[0], str(named[0]))


def _write(match: Match, facts: Facts) -> Writing:
    source = match.source
    found = _update(source, match.node)
    assert found is not None
    computed = computed_of(found.given, source)
    assert computed is not None
    need_reads(match, facts, computed)
    for number in range(len(computed.reads)):
        match.need(facts, f"L{number}", "is a tensor of floats", is_floating)
    flat = all(
        facts.holds(of_part(f"L{n}", lambda seen: not seen.shape))
        for n in range(len(computed.reads))
    )
    if facts.seen and not flat:
        raise FixRefused("a tensor with dimensions is not formatted as a number")
    text = on_device(source, found.given, computed, facts, ".double()")
    return Writing((TextEdit.of(source, found.given, text), *_reads(source, found, _kept(found))))


def _kept(found: _Update) -> set[str]:
    """Return the attributes that hold what is computed from the argument. Raises `FixRefused`."""
    itself = found.method.args.args[0].arg
    kept, copies, grown = {found.parameter}, set(), set()
    for _ in found.method.body:  # a chain of assignments is at most as long as the body
        for statement in _statements(found.method.body):
            value, target = statement.value, _target(statement)
            if not _uses(value, kept):
                continue
            kept.add(target)
            if not _is_arithmetic(value, kept):
                raise FixRefused(
                    f"`{found.kind.name}.{found.method.name}` does more with the number than compute"
                )
            if isinstance(statement, ast.AugAssign):
                grown.add(target)
            elif same := _same(value) & kept:
                copies |= {target, *same}
    if both := grown & copies:
        raise FixRefused(f"the meter's `{min(both)}` would change under another name")
    return {one.removeprefix(f"{itself}.") for one in kept if one.startswith(f"{itself}.")}


def _statements(body: list[ast.stmt]) -> Iterator[ast.Assign | ast.AugAssign]:
    for statement in body:
        if isinstance(statement, ast.Assign | ast.AugAssign):
            yield statement
        elif not (isinstance(statement, ast.Expr) and constant_of(statement.value) is not None):
            raise FixRefused("the meter does more with the number than compute with it")


def _target(statement: ast.Assign | ast.AugAssign) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if len(targets) > 1 or not isinstance(targets[0], ast.Name | ast.Attribute):
        raise FixRefused("the meter keeps the number in a container")
    return ast.unparse(targets[0])


def _uses(value: ast.expr, kept: set[str]) -> bool:
    return any(ast.unparse(one) in kept for one in ast.walk(value) if isinstance(one, ast.expr))


def _is_arithmetic(value: ast.expr, kept: set[str]) -> bool:
    """Return True if the device can compute a value that depends on the argument."""
    if not _uses(value, kept) or isinstance(value, ast.Name | ast.Attribute):
        return True
    if isinstance(value, ast.IfExp):
        sides = (value.body, value.orelse)
        return not _uses(value.test, kept) and all(_is_arithmetic(one, kept) for one in sides)
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.USub) and _is_arithmetic(value.operand, kept)
    return (
        isinstance(value, ast.BinOp)
        and isinstance(value.op, _OPERATORS)
        and _is_arithmetic(value.left, kept)
        and _is_arithmetic(value.right, kept)
    )


def _same(value: ast.expr) -> set[str]:
    """Return the names that a value may be another name of."""
    if isinstance(value, ast.IfExp):
        return _same(value.body) | _same(value.orelse)
    return {ast.unparse(value)} if isinstance(value, ast.Name | ast.Attribute) else set()


def _reads(source: SourceFile, found: _Update, kept: set[str]) -> Iterator[TextEdit]:
    """Yield the edits of the meter's reads: outside f-strings they need a number."""
    name, function = found.meter.id, source.function(found.call)
    if not isinstance(function, ast.Module) and not is_private(source, function, name):
        raise FixRefused(f"an inner function may see `{name}`")
    for use in loads(function, name):
        outer = source.parents[use]
        if not isinstance(outer, ast.Attribute) or not isinstance(outer.ctx, ast.Load):
            raise FixRefused(f"line {use.lineno} gives `{name}` to other code, which needs numbers")
        call = source.parents[outer]
        if isinstance(call, ast.Call) and outer is call.func:
            _check_method(source, found, call, kept)
        elif outer.attr in kept and not _is_formatted(source, outer):
            if not has_own_text(source, outer):
                raise FixRefused(f"line {use.lineno} computes with `{name}` inside an f-string")
            yield TextEdit.of(source, outer, _number(source, found, outer))
        elif any(one.name == outer.attr for one in find_all(found.kind, ast.FunctionDef)):
            raise FixRefused(f"`{name}.{outer.attr}` is a property of its class")


def _number(source: SourceFile, found: _Update, read: ast.Attribute) -> str:
    """Return the read of a number that may still be the initial one."""
    text, itself = source.segment(read), found.method.args.args[0].arg
    first = [
        one.value
        for one in ast.walk(found.kind)
        if isinstance(one, ast.Assign)
        and f"{itself}.{read.attr}" in map(ast.unparse, one.targets)
        and isinstance(one.value, ast.Constant)
    ]
    floats = all(isinstance(one.value, float) for one in first)
    return f"float({text})" if floats else f"torch.as_tensor({text}).item()"


def _is_formatted(source: SourceFile, read: ast.Attribute) -> bool:
    outer = source.parents[read]
    if isinstance(outer, ast.keyword):
        outer = source.parents[outer]
    if isinstance(outer, ast.Call) and isinstance(outer.func, ast.Attribute):
        text = outer.func.value
        return outer.func.attr == "format" and isinstance(constant_of(text), str)
    return isinstance(outer, ast.FormattedValue) and outer.conversion == -1


def _check_method(source: SourceFile, found: _Update, call: ast.Call, kept: set[str]) -> None:
    """Raise `FixRefused` if a call gives the meter plain numbers, or reads what it computed."""
    assert isinstance(call.func, ast.Attribute)
    name = call.func.attr
    if name == found.method.name and call is not found.call:
        raise FixRefused(f"line {call.lineno} calls `{source.segment(call.func)}` too")
    itself = found.method.args.args[0].arg
    texts = {f"{itself}.{one}" for one in kept}
    for method in found.kind.body:
        own = isinstance(method, ast.FunctionDef) and method.name == name
        if own and method is not found.method:
            parts = (one for one in ast.walk(method) if isinstance(one, ast.Attribute))
            loaded = {ast.unparse(one) for one in parts if isinstance(one.ctx, ast.Load)}
            if loaded & texts:
                raise FixRefused(f"`{found.kind.name}.{name}` needs the number")


FIX = Fix(codes=("TT101",), equivalence="ROUNDING", find=_find, write=_write)
