"""`meter.update(loss.item(), n)` gives the meter the tensor, which is read where its numbers are used.

Each `.item()` waits until the device has computed the loss. A meter such as `AverageMeter` only adds,
multiplies and divides what it gets, so the device can do that, in 64 bits, as Python does:
`meter.update(loss.detach().double(), n)`. A meter's number in an f-string reads its tensor there; elsewhere
it is read by `float`.

The meter's class has to be in the project: its method may only compute with the number, and store it in
attributes. A device divides by a Python number as a multiplication by its reciprocal, so an average may
differ in its last bit.

Refused if other code gets the meter, which would see tensors, unless a class of the project that only formats
its meters, such as `ProgressMeter`; and for integers, which an f-string shows otherwise than floats.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torchtrim.errors import UnreadableInput
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.reads import computed_of, need_reads, on_device
from torchtrim.source.facts import Facts, FixRefused, is_floating, of_part
from torchtrim.source.names import assigned_name, assigned_to, is_private, loads, stores
from torchtrim.source.nodes import constant_of, find_all, function_of, keywords_of, method_of
from torchtrim.source.source import SourceFile, read_source
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
    kinds = {_class_of(one.func, source) if isinstance(one, ast.Call) else None for one in made}
    kind = kinds.pop() if len(kinds) == 1 else None
    methods = _methods(kind, name) if kind else []
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
        if _is_only_formatted(source, found, use, kept):
            continue
        if not isinstance(outer, ast.Attribute) or not isinstance(outer.ctx, ast.Load):
            raise FixRefused(f"line {use.lineno} gives `{name}` to other code, which needs numbers")
        call = source.parents[outer]
        if isinstance(call, ast.Call) and outer is call.func:
            _check_method(source, found, call, kept)
        elif outer.attr in kept and function_of(source.parents[outer]) == "float":
            continue
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
    if call is not found.call and not _only_formats(found.kind, name, kept):
        raise FixRefused(f"`{found.kind.name}.{name}` needs the number")


def _only_formats(kind: ast.ClassDef, name: str, kept: set[str]) -> bool:
    """Return True unless a method reads what the meter keeps for more than text."""
    above = _parents(kind)
    for part in (
        part for method in _methods(kind, name) for part in find_all(method, ast.Attribute)
    ):
        read = isinstance(part.ctx, ast.Load) and isinstance(part.value, ast.Name)
        if read and part.attr in {*kept, "__dict__"} and not _is_shown(above, part):
            return False
    return name not in ("__getattr__", "__getattribute__")


def _methods(kind: ast.ClassDef, name: str) -> list[ast.stmt]:
    return [one for one in kind.body if getattr(one, "name", "") == name]


def _parents(kind: ast.ClassDef) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(kind) for child in ast.iter_child_nodes(node)}


def _is_shown(above: dict[ast.AST, ast.AST], part: ast.AST) -> bool:
    """Return True for a value in an f-string, or given to `text.format`."""
    outer = above[part]
    outer = above[outer] if isinstance(outer, ast.keyword) else outer
    if isinstance(outer, ast.Call):
        return method_of(outer) == "format" and part is not outer.func
    return isinstance(outer, ast.FormattedValue) and outer.conversion == -1


def _is_only_formatted(source: SourceFile, found: _Update, use: ast.Name, kept: set[str]) -> bool:
    """Return True if a class of the project gets the meter, and does nothing but format it."""
    held = source.parents[use]
    given: ast.AST = use
    if isinstance(held, ast.List | ast.Tuple):
        given, held = held, source.parents[held]
    if isinstance(held, ast.keyword):
        given, held = held, source.parents[held]
    kind = _class_of(held.func, source) if isinstance(held, ast.Call) else None
    if kind is None or not isinstance(held, ast.Call) or given is held.func:
        return False
    holder = assigned_name(source.statement(held))
    for user in loads(source.function(use), holder or ""):
        method = source.parents[user]
        call = source.parents[method]
        if not isinstance(call, ast.Call) or call.func is not method:
            return False
    return holder is not None and _formats(found, kind, _parameter(kind, held, given), kept)


def _parameter(kind: ast.ClassDef, call: ast.Call, given: ast.AST) -> str:
    """Return the name of a constructor's parameter for an argument, or `""`."""
    if isinstance(given, ast.keyword):
        return given.arg or ""
    init = next(iter(_methods(kind, "__init__")), None)
    if not isinstance(init, ast.FunctionDef) or given not in call.args:
        return ""
    at, names = call.args.index(given) + 1, [one.arg for one in init.args.args]
    return names[at] if at < len(names) else init.args.vararg.arg if init.args.vararg else ""


def _formats(found: _Update, kind: ast.ClassDef, parameter: str, kept: set[str]) -> bool:
    """Return True if a class only iterates over what it gets by a parameter, and formats each item."""
    above = _parents(kind)
    attributes, items = set(), set()
    for use in find_all(kind, ast.Name):
        if use.id == parameter:
            assign = above[use]
            target = assign.targets[0] if isinstance(assign, ast.Assign) else None
            if not isinstance(target, ast.Attribute):
                return False
            attributes.add(target.attr)
    for part in find_all(kind, ast.Attribute):
        if part.attr in attributes and isinstance(part.ctx, ast.Load):
            loop = above[part]
            if not isinstance(loop, ast.comprehension | ast.For) or loop.iter is not part:
                return False
            if not isinstance(loop.target, ast.Name):
                return False
            items.add(loop.target.id)
    return bool(attributes) and all(
        _is_text(found, above, one, kept)
        for one in find_all(kind, ast.Name)
        if one.id in items and isinstance(one.ctx, ast.Load)
    )


def _is_text(
    found: _Update,
    above: dict[ast.AST, ast.AST],
    item: ast.Name,
    kept: set[str],
) -> bool:
    """Return True if an item is only made text, by `str` or a method that formats."""
    outer = above[item]
    if isinstance(outer, ast.Attribute):
        call = above[outer]
        called_there = isinstance(call, ast.Call) and call.func is outer
        return called_there and _only_formats(found.kind, outer.attr, kept)
    texts = function_of(outer) == "str" or isinstance(outer, ast.FormattedValue)
    return texts and _only_formats(found.kind, "__str__", kept)


def _class_of(name: ast.expr, source: SourceFile) -> ast.ClassDef | None:
    """Return the class without bases that a name is, in the file itself or in one that it imports."""
    dotted = source.dotted(name)
    if dotted is None:
        return _in(source.tree, name.id) if isinstance(name, ast.Name) else None
    module, _, last = dotted.rpartition(".")
    for folder in list(Path(source.path).resolve().parents)[:_MOST_FOLDERS]:
        path = folder.joinpath(*module.split(".")) if module else folder
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if module and file.is_file():
                return _in(_tree(file), last)
    return None


_MOST_FOLDERS = 4
"""Folders above a file that may be the project's root. Arbitrary: few scripts lie deeper."""


def _in(tree: ast.Module, name: str) -> ast.ClassDef | None:
    found = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    plain = len(found) == 1 and not found[0].keywords and not found[0].decorator_list
    bases = [ast.unparse(base) for base in found[0].bases] if plain else ["?"]
    return found[0] if bases in ([], ["object"]) else None


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    try:
        return SourceFile(str(path), read_source(path)[0]).tree
    except (UnreadableInput, OSError):
        return ast.Module([], [])


FIX = Fix(codes=("TT101",), equivalence="ROUNDING", find=_find, write=_write)
