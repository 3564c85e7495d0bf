"""Reads that can move out of a loop, and reads whose tensor can replace the number."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.fix import Find, Match, TextEdit, applied, with_parts
from torchtrim.rewriter.replace import atom, fresh, unused
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    is_floating,
    is_integral,
    is_number,
    is_tensor,
    of_part,
)
from torchtrim.source.names import (
    assignment_before,
    is_private,
    lifetime,
    loads,
    only_reads,
    parameters,
    stores,
)
from torchtrim.source.nodes import (
    called,
    constant_of,
    find_all,
    function_of,
    inverted,
    method_of,
    name_set,
    receiver,
)
from torchtrim.source.operations import is_pure
from torchtrim.source.source import Function, Loop, SourceFile, spot, within
from torchtrim.source.transfers import Read, is_single, read_of

_LARGE_POWER = 5  # a float32 to a smaller one fits into 64 bits, where Python raises no error
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_TRUTH = name_set("""
    eq ne lt le gt ge equal not_equal less less_equal greater greater_equal isnan isinf isfinite
    logical_and logical_or logical_not logical_xor bool isclose
""")


@dataclass(frozen=True)
class Computed:
    """An expression of reads and numbers such as `norm.item() ** 2 * n`, its divisions by a number, and the
    exponents in it."""

    reads: tuple[Read, ...]
    numbers: tuple[ast.expr, ...]
    divisions: tuple[ast.BinOp, ...]
    exponents: tuple[ast.expr, ...]

    @property
    def exact(self) -> bool:
        """True without a division by a number, and without powers."""
        return not self.divisions and not self.exponents

    @property
    def parts(self) -> dict[str, ast.expr]:
        """The parts to observe."""
        tensors = {f"L{n}": read.tensor for n, read in enumerate(self.reads)}
        return tensors | {f"K{n}": number for n, number in enumerate(self.numbers)}


def together(every: Iterable[Computed]) -> Computed:
    """Return several expressions as one."""
    reads, numbers, divisions, exponents = zip(
        *((one.reads, one.numbers, one.divisions, one.exponents) for one in every), strict=True
    )
    return Computed(
        tuple(chain(*reads)),
        tuple(chain(*numbers)),
        tuple(chain(*divisions)),
        tuple(chain(*exponents)),
    )


def computed_of(node: ast.expr, source: SourceFile) -> Computed | None:
    """Return the reads and numbers of a sum, difference, product, quotient or power; None for another
    expression."""
    leaves = list(_leaves(node, source))
    reads = tuple(leaf for leaf in leaves if isinstance(leaf, Read))
    numbers = tuple(leaf for leaf in leaves if not isinstance(leaf, Read))
    if not reads or not all(is_pure(number, source) for number in numbers):
        return None
    if any(read_of(part, source) for number in numbers for part in ast.walk(number)):
        return None
    operators = [one for one in find_all(node, ast.BinOp) if one.right in numbers]
    divisions = tuple(one for one in operators if isinstance(one.op, ast.Div))
    exponents = tuple(one.right for one in operators if isinstance(one.op, ast.Pow))
    return Computed(reads, numbers, divisions, exponents)


def _leaves(node: ast.expr, source: SourceFile) -> Iterator[Read | ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        yield from _leaves(node.left, source)
        if isinstance(node.op, ast.Div):
            yield node.right
        else:
            yield from _leaves(node.right, source)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _leaves(node.operand, source)
    elif (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and read_of(node.left, source)
    ):
        yield from (*_leaves(node.left, source), node.right)
    else:
        yield read_of(node, source) or node


def need_reads(match: Match, facts: Facts, computed: Computed) -> None:
    """Require tensors that can be computed with on their device, and Python numbers."""
    for number, read in enumerate(computed.reads):
        part = f"L{number}"
        facts.need(
            f"`{match.text(part)[:60]}` is a tensor of one number, on a device with 64-bit floats",
            of_part(part, partial(_readable, cast=read.cast)),
            static=of_part(part, is_tensor),
        )
        counted = facts.holds(of_part(part, lambda seen: seen.dtype == "int64"))
        if counted and not is_count(read.tensor):
            # Sums of 64-bit integers may overflow where Python's do not.
            facts.leave_open(
                f"`{match.text(part)[:60]}` is a count, so that its sum does not overflow"
            )
        if computed.exponents:
            match.need(facts, part, "is of floats", is_floating)
    for number in range(len(computed.numbers)):
        match.need(facts, f"K{number}", "is a Python number", is_number)
    facts.only("the device", lambda v: v.L0.device, "")
    for values in facts.executions:
        tensors = (getattr(values, f"L{n}", None) for n in range(len(computed.reads)))
        if len({tensor.device for tensor in tensors if tensor is not None}) > 1:
            raise FixRefused("its tensors are on several devices")


def risk_of(computed: Computed) -> str:
    """Say what a power on the device may do otherwise than on the host, or return `""`."""
    usual = (constant_of(one) for one in computed.exponents)
    if all(type(one) is int and 0 < one < _LARGE_POWER for one in usual):
        return ""
    return "a power that Python makes complex, or refuses, is NaN or infinite on the device"


def _readable(seen: ObservedValue, cast: str) -> bool:
    fits = cast != "int" or is_integral(seen)
    return (
        is_single(seen)
        and (is_floating(seen) or is_integral(seen))
        and seen.device.startswith(("cpu", "cuda"))
        and (fits if cast != "bool" else seen.dtype == "bool")
    )


def is_count(node: ast.expr) -> bool:
    """Return True for a sum over booleans."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "count_nonzero":
        return True
    of_torch = node.args and ast.unparse(node.func.value) == "torch"
    return node.func.attr == "sum" and _is_truth(node.args[0] if of_torch else node.func.value)


def _is_truth(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare):
        return True
    if operand := inverted(node):
        return _is_truth(operand)
    if isinstance(node, ast.BinOp):
        both = _is_truth(node.left) and _is_truth(node.right)
        return both and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
    return method_of(node) in _TRUTH


def gives_int(facts: Facts, computed: Computed) -> bool:
    """Return True if the computed value is an `int` on the host; without a run, by casts and counts."""
    if not facts.seen:
        whole = all(read.cast == "int" or _is_plain_count(read) for read in computed.reads)
        return whole and not computed.numbers
    whole = all(facts.holds(of_part(f"L{n}", is_integral)) for n in range(len(computed.reads)))
    whole &= all(
        facts.holds(of_part(f"K{n}", lambda seen: seen.kind == "int"))
        for n in range(len(computed.numbers))
    )
    return whole and computed.exact and all(read.cast != "float" for read in computed.reads)


def _is_plain_count(read: Read) -> bool:
    return read.cast != "float" and is_count(read.tensor)


def on_device(
    source: SourceFile, node: ast.expr, computed: Computed, facts: Facts, cast: str
) -> str:
    """Return the expression's text with cast, detached tensors in place of their reads."""
    edits = [
        TextEdit.of(
            source, read.node, atom(source, read.tensor) + _casts(source, facts, n, read, cast)
        )
        for n, read in enumerate(computed.reads)
        if within(read.node, node)
    ]
    for part in computed.divisions:
        if within(part, node) and not constant_of(part.right):
            at = source.text.index("/", source.end(part.left))
            edits.append(TextEdit(at, at + 1, "*"))
            edits.append(TextEdit.of(source, part.right, f"(1 / {atom(source, part.right)})"))
    return applied(source.text, edits, source.start(node), source.end(node))


def _casts(source: SourceFile, facts: Facts, number: int, read: Read, cast: str) -> str:
    if not facts.seen and cast == ".long()" and is_count(read.tensor):
        return ""
    part = f"L{number}"
    made = _chain(source, read.tensor)
    whole = facts.holds(lambda v: is_integral(getattr(v, part)))
    graded = "" if whole or not made.isdisjoint(("data", "detach")) else ".detach()"
    kept = cast == ".long()" and facts.holds(lambda v: getattr(v, part).dtype == "int64")
    return graded + ("" if kept or (cast == ".double()" and "double" in made) else cast)


_KEEPS = name_set("norm sum mean abs max min amax amin pow sqrt square squeeze flatten")
"""Methods whose result, of one tensor and numbers, has that tensor's type, if it is of floats."""


def _chain(source: SourceFile, node: ast.expr) -> set[str]:
    """Return what the source shows of a tensor: `double`, its type; `data` or `detach`, no gradient."""
    if isinstance(node, ast.Name):
        assign = assignment_before(source, node.id, source.statement(node))
        uses = loads(source.function(node), node.id)
        if assign is None or not all(only_reads(source, use) for use in uses):
            return set()
        node = assign.value
    found: set[str] = set()
    while True:
        if isinstance(node, ast.Attribute) and node.attr == "data":
            found, node = found | {"data"}, node.value
        elif of := receiver(node, ("double", "detach")):
            found, node = found | {method_of(node)}, of
        elif (of := receiver(node, _KEEPS)) and _is_plain(node):
            node = of
        else:
            return found


def _is_plain(call: ast.AST) -> bool:
    """Return True if a method gets literals alone, except for the order of a norm."""
    assert isinstance(call, ast.Call)
    given = [*call.args, *(word.value for word in call.keywords)]
    named = call.args[:1] if method_of(call) == "norm" else []
    return all(isinstance(one, ast.Constant) or one in named for one in given)


def name_of(
    source: SourceFile,
    node: ast.expr,
    tensor: ast.expr,
    what: str = "value",
    taken: Container[str] = (),
) -> str:
    """Return an unused name for the value that a node reads: `loss_value`, `loss_mean` of a mean."""
    what = method_of(tensor) or what
    words = re.findall(r"[A-Za-z_]\w*", ast.unparse(tensor))
    known = (word for word in words if word not in ("self", "cls", "torch", what))
    return unused(fresh(source, node, f"{next(known, 'the')}_{what}"), taken)


def widest_loop(source: SourceFile, statement: ast.stmt, name: str) -> Loop:
    """Return the outermost loop around the statement that ends before the name is used.

    Raises `FixRefused` if code outside the function may see the name in the meantime.
    """
    function, loop = source.function(statement), source.loop(statement)
    part = lifetime(source, statement, name)
    if loop is None:
        raise FixRefused("it is not in a loop")
    if isinstance(function, ast.Lambda) or not is_private(source, function, name):
        raise FixRefused(f"an inner function, or `global`, may see `{name}` in the meantime")
    if name in parameters(function):
        raise FixRefused(f"`{name}` is an argument, so its initial value is unknown here")
    used = [*loads(part, name), *stores(part, name)]
    while (outer := source.loop(loop)) is not None:
        if set(used) & (set(ast.walk(outer)) - set(ast.walk(loop))):
            break
        loop = outer
    if _may_go_on(source, loop):
        raise FixRefused("a `try` around the loop may use it before the loop ends")
    return loop


def _may_go_on(source: SourceFile, loop: ast.AST) -> bool:
    for outer in source.around(loop):
        if isinstance(outer, ast.Try):
            return True
        if isinstance(outer, ast.With | ast.AsyncWith):
            managers = (item.context_expr for item in outer.items)
            names = {called(one.func if isinstance(one, ast.Call) else one) for one in managers}
            if not names.isdisjoint(("suppress", "raises", "assertRaises")):
                return True
        if isinstance(outer, Function):
            return False
    return False


WIDE = ("float32", "float64")
_READS = ("float", "int", "bool")
_WITH = "WITH"
_DEEPEST = 8  # arbitrary: a value that passes through more names is rarely worth the search


def with_companions(find: Find, *, bounded: bool = False) -> Find:
    """Add the operands that each match's value is combined with, as parts `WITH0`, `WITH1`, ...

    `bounded` follows the value through `max(value, 1)`; see `bounds_of`.
    """

    def operands(match: Match) -> Iterator[ast.expr]:
        uses = _uses(match.source, match.node, 0, [] if bounded else None)
        return (use for use in uses if isinstance(use, ast.expr))

    return with_parts(find, _WITH, operands)


def bounds_of(match: Match) -> list[ast.Call]:
    """Return the calls `max(value, 1)` that the match's value passes through."""
    bounds: list[ast.Call] = []
    list(_uses(match.source, match.node, 0, bounds))
    return bounds


def need_tensor_uses(match: Match, facts: Facts, part: str, *, bounded: bool = False) -> None:
    """Require that a tensor on the device of `part` can replace the match's number.

    Each use must be arithmetic with a floating tensor there, which keeps the result's type, or a read that
    accepts a tensor. Raises `FixRefused` with the first other use.
    """
    for use in _uses(match.source, match.node, 0, [] if bounded else None):
        if isinstance(use, str):
            raise FixRefused(
                f"its value is needed as a Python number: {use}. Keep the read, but do it late or "
                "together with others"
            )
    for name in match.parts:
        if name.startswith(_WITH):
            facts.need(
                f"`{match.text(name)[:60]}` is a floating tensor on the same device",
                lambda v, name=name: (
                    is_floating(getattr(v, name))  # type: ignore[misc]
                    and getattr(v, name).device == getattr(v, part).device
                ),
            )


def need_wide_uses(match: Match, facts: Facts) -> None:
    """Require float32 or float64 next to an integer: 16 bits would round it, or overflow."""
    for name in match.parts:
        if name.startswith(_WITH):
            match.need(facts, name, "is of float32 or float64", lambda seen: seen.dtype in WIDE)


def _uses(
    source: SourceFile, node: ast.AST, depth: int, bounds: list[ast.Call] | None
) -> Iterator[ast.expr | str]:
    """Yield the operands that a value is combined with and, as text, each use that needs a number.

    `bounds` collects the calls of `max` that the value passes through, or is None to refuse them.
    """
    outer = source.parents[node]
    where = f"line {spot(node)[0]}"
    if depth > _DEEPEST:
        yield f"{where}, and more after it"
    elif isinstance(outer, ast.BinOp) and isinstance(outer.op, _OPERATORS):
        yield outer.left if outer.right is node else outer.right
    elif isinstance(outer, ast.AugAssign) and isinstance(outer.op, _OPERATORS):
        yield outer.target
    elif isinstance(outer, ast.UnaryOp) and not isinstance(outer.op, ast.Not):
        yield from _uses(source, outer, depth + 1, bounds)
    elif isinstance(outer, ast.Call) and node in outer.args and function_of(outer) in _READS:
        return
    elif bounds is not None and isinstance(outer, ast.Call) and _is_bound(source, outer, node):
        bounds.append(outer)
        yield from _uses(source, outer, depth + 1, bounds)
    elif isinstance(outer, ast.Assign) and len(outer.targets) == 1:
        yield from _uses_of_name(source, outer, depth, bounds)
    else:
        yield f"{where}, `{source.segment(outer)[:60]}`" if isinstance(outer, ast.expr) else where


def _is_bound(source: SourceFile, call: ast.Call, node: ast.AST) -> bool:
    """Return True for the builtin `max` of the node, a name, and a literal integer."""
    if function_of(call) != "max" or call.keywords or len(call.args) != 2:
        return False
    if "max" in source.imported or stores(source.tree, "max"):
        return False
    others = [constant_of(one) for one in call.args if one is not node]
    return isinstance(node, ast.Name) and [type(other) for other in others] == [int]


def _uses_of_name(
    source: SourceFile, assigned: ast.Assign, depth: int, bounds: list[ast.Call] | None
) -> Iterator[ast.expr | str]:
    target = assigned.targets[0]
    function = source.function(assigned)
    if not isinstance(target, ast.Name) or not isinstance(function, Function):
        yield f"line {assigned.lineno}, which takes it out of the function"
        return
    if len(stores(function, target.id)) > 1:
        yield f"line {assigned.lineno}, which assigns it to a name with other values too"
        return
    for use in loads(function, target.id):
        if source.function(use) is not function:
            yield f"line {use.lineno}, in an inner function"
        else:
            yield from _uses(source, use, depth + 1, bounds)
