"""What reads that are put off until a loop is over have in common."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from torchtrim.records.seen import Seen
from torchtrim.rewriter.fix import Match
from torchtrim.rewriter.replace import atom
from torchtrim.source.facts import (
    Facts,
    Refused,
    Values,
    is_floating,
    is_integral,
    is_number,
    is_tensor,
)
from torchtrim.source.names import is_private
from torchtrim.source.purity import is_pure
from torchtrim.source.reads import Read, is_single, read_of
from torchtrim.source.source import Function, Loop, Source
from torchtrim.source.uses import loads, stores

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_TRUTH_NAMES = """
    eq ne lt le gt ge equal not_equal less less_equal greater greater_equal isnan isinf isfinite
    logical_and logical_or logical_not logical_xor bool isclose
"""
_TRUTH = frozenset(_TRUTH_NAMES.split())
_SWALLOWING = frozenset(("suppress", "raises", "assertRaises"))


@dataclass(frozen=True)
class Computed:
    """An expression of reads and numbers: `loss.item() * n`. `exact`: not divided by a number."""

    reads: tuple[Read, ...]
    numbers: tuple[ast.expr, ...]
    exact: bool = True

    @property
    def parts(self) -> dict[str, ast.expr]:
        """What of it is to be watched."""
        found: dict[str, ast.expr] = {f"L{n}": read.tensor for n, read in enumerate(self.reads)}
        return found | {f"K{n}": number for n, number in enumerate(self.numbers)}


def computed_of(node: ast.expr, source: Source) -> Computed | None:
    """The reads and numbers that sums, differences, products and quotients are made of; None otherwise."""
    found = list(_leaves(node, source))
    reads = tuple(one for one in found if isinstance(one, Read))
    numbers = tuple(one for one in found if not isinstance(one, Read) and is_pure(one, source))
    if not reads or len(reads) + len(numbers) < len(found):
        return None
    if any(read_of(part, source) for number in numbers for part in ast.walk(number)):
        return None
    divided = [one for one in ast.walk(node) if isinstance(one, ast.Div)]
    return Computed(reads, numbers, exact=not divided)


def _leaves(node: ast.expr, source: Source) -> Iterator[Read | ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        yield from _leaves(node.left, source)
        if isinstance(node.op, ast.Div):
            yield node.right
        else:
            yield from _leaves(node.right, source)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield from _leaves(node.operand, source)
    else:
        yield read_of(node, source) or node


def need_reads(match: Match, facts: Facts, computed: Computed) -> None:
    """What must hold of the tensors that are read and the numbers."""
    for number, read in enumerate(computed.reads):
        part = f"L{number}"
        facts.need(
            f"`{match.text(part)[:60]}` is a tensor of one number, on a device that has 64-bit floats",
            lambda v, part=part, read=read: _readable(v, part, read),  # type: ignore[misc]
            told=lambda v, part=part: is_tensor(getattr(v, part)),  # type: ignore[misc]
        )
        if facts.holds(lambda v, part=part: getattr(v, part).dtype == "int64"):  # type: ignore[misc]
            _need_count(match, facts, read, part)
    for number in range(len(computed.numbers)):
        facts.need(
            f"`{match.text(f'K{number}')[:60]}` is a number of Python's",
            lambda v, part=f"K{number}": is_number(getattr(v, part)),  # type: ignore[misc]
        )
    facts.only("the device", lambda v: getattr(v, "L0").device, "")  # noqa: B009
    if any(v for v in facts.executions if len({v_.device for v_ in _tensors(v, computed)}) > 1):
        raise Refused("its tensors are on several devices")


def _tensors(values: Values, computed: Computed) -> list[Seen]:
    return [
        getattr(values, f"L{n}") for n in range(len(computed.reads)) if hasattr(values, f"L{n}")
    ]


def _readable(values: Values, part: str, read: Read) -> bool:
    seen = getattr(values, part)
    cast = read.cast != "int" or is_integral(seen)
    return (
        is_single(seen)
        and (is_floating(seen) or is_integral(seen))
        and seen.device.startswith(("cpu", "cuda"))
        and (cast if read.cast != "bool" else seen.dtype == "bool")
    )


def _need_count(match: Match, facts: Facts, read: Read, part: str) -> None:
    """Sums of 64-bit integers could overflow where Python's do not, unless each is a count."""
    if not is_count(read.tensor):
        facts.leave_open(f"`{match.text(part)[:60]}` is a count, whose sum does not overflow")


def is_count(node: ast.expr) -> bool:
    """Whether it is written as a sum over truth values."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "count_nonzero":
        return True
    args = (
        node.args if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" else ()
    )
    inner = args[0] if args else node.func.value
    return node.func.attr == "sum" and _is_truth(inner)


def _is_truth(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert) and _is_truth(node.operand)
    if isinstance(node, ast.BinOp):
        both = _is_truth(node.left) and _is_truth(node.right)
        return both and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor)
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return method and node.func.attr in _TRUTH  # type: ignore[attr-defined]


def gives_int(facts: Facts, computed: Computed) -> bool:
    """Whether the computed value is an `int` on the host."""
    whole = all(
        facts.holds(lambda v, n=n: is_integral(getattr(v, f"L{n}")))  # type: ignore[misc]
        for n in range(len(computed.reads))
    )
    whole &= all(
        facts.holds(lambda v, n=n: getattr(v, f"K{n}").kind == "int")  # type: ignore[misc]
        for n in range(len(computed.numbers))
    )
    return whole and computed.exact and all(read.cast != "float" for read in computed.reads)


def on_device(source: Source, node: ast.expr, computed: Computed, facts: Facts, cast: str) -> str:
    """The expression's text with tensors in the place of their reads: cast, and without gradients."""
    start, text = source.start(node), source.segment(node)
    changes: list[tuple[ast.expr, str]] = []
    for number, read in enumerate(computed.reads):
        changes.append((read.node, atom(source, read.tensor) + _casts(facts, f"L{number}", cast)))
    for part in ast.walk(node):
        if (
            isinstance(part, ast.BinOp)
            and isinstance(part.op, ast.Div)
            and not _is_nonzero(part.right)
        ):
            changes.append((part.right, f"(1 / {atom(source, part.right)})"))
            between = source.text[source.end(part.left) : source.start(part.right)]
            at = source.end(part.left) - start + between.index("/")
            text = f"{text[:at]}*{text[at + 1 :]}"
    for one, new in sorted(changes, key=lambda change: source.start(change[0]), reverse=True):
        at, to = source.start(one) - start, source.end(one) - start
        text = text[:at] + new + text[to:]
    return text


def _casts(facts: Facts, part: str, cast: str) -> str:
    """What comes after a tensor: nothing where it is of the type, and no gradient flows to it."""
    graded = "" if facts.holds(lambda v: is_integral(getattr(v, part))) else ".detach()"
    kept = cast == ".long()" and facts.holds(lambda v: getattr(v, part).dtype == "int64")
    return graded + ("" if kept else cast)


def _is_nonzero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def widest_loop(source: Source, statement: ast.stmt, name: str) -> Loop:
    """The outermost loop around the statement after which the name is looked at first.

    Raises `Refused` where others than this function may see the name meanwhile.
    """
    function, loop = source.function(statement), source.loop(statement)
    if loop is None:
        raise Refused("it is in no loop")
    if isinstance(function, ast.Lambda) or not is_private(source, function, name):
        raise Refused(f"a function within, or `global`, may see `{name}` meanwhile")
    if not isinstance(function, ast.Module) and name in _arguments(function):
        raise Refused(f"`{name}` is an argument: what it is at first is not known here")
    used = [*loads(function, name), *stores(function, name)]
    while (outer := source.loop(loop)) is not None:
        own = {id(node) for node in ast.walk(loop)}
        if any(id(use) not in own and _is_in(source, use, outer) for use in used):
            break
        loop = outer
    if _may_go_on(source, loop):
        raise Refused("a `try` around the loop may go on with it before the loop is over")
    return loop


def _is_in(source: Source, node: ast.AST, outer: ast.AST) -> bool:
    return any(one is outer for one in source.around(node))


def _arguments(function: ast.AST) -> set[str]:
    arguments = getattr(function, "args", None)
    nodes = ast.walk(arguments) if arguments is not None else ()
    return {node.arg for node in nodes if isinstance(node, ast.arg)}


def _may_go_on(source: Source, loop: ast.AST) -> bool:
    for outer in source.around(loop):
        if isinstance(outer, ast.Try):
            return True
        if isinstance(outer, ast.With | ast.AsyncWith) and any(map(_swallows, outer.items)):
            return True
        if isinstance(outer, Function):
            return False
    return False


def _swallows(item: ast.withitem) -> bool:
    call = item.context_expr
    function = call.func if isinstance(call, ast.Call) else call
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _SWALLOWING
