"""`if c: return a` and `return b` become one `torch.where(c, a, b)` where both are tensors of one shape.

A condition on the device makes the host wait to know which way to go. Where both ways only compute a
tensor, both can be computed and the device chooses. This holds for two returns, for two assignments to
one name, for `a if c else b`, and for `if c: x = f(x)`.

Both must be of one shape, type and device, be made of functions that do not raise, wait or draw random
numbers whatever their inputs hold, and pass gradients to the same tensors. What is not chosen must not
make a gradient NaN: where its gradient depends on the tensors' values they are replaced by zeros before,
since `where` behind it alone would multiply an infinity by zero.

What was seen to be of one shape and type is tested for, which needs no sync; else the host chooses as
before. Without a run it is written only where the source shows that both ways agree in type, shape and
gradient and raise for the same inputs, as `x.exp()` and `x * 0.5` do.

`and`, `or`, `not` and chained comparisons of tensors become `&`, `|` and `~`, and all operands are
computed. Refused where one is a value of Python's, which a run shows one way only: give it its own `if`.

Refused where the result was the same tensor as before and may be written to afterwards. Offered, not
made, where one way passes gradients to a tensor that the other does not: it gets zeros in place of none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchtrim.records.seen import Seen
from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.guarded import guarded, kinds_seen
from torchtrim.rewriter.replace import check_comments, comments, fresh, insert_before, torch_of
from torchtrim.rewriter.truth import (
    as_tensor,
    need_operands,
    operand_parts,
    operands,
    seen_operands,
    used_as_tensors,
)
from torchtrim.source.alike import Form, common_form
from torchtrim.source.branches import Assigns, Branch, branches, origins
from torchtrim.source.facts import Facts, Refused, Values, is_tensor, need_tensor
from torchtrim.source.names import is_private, only_reads, was_fresh
from torchtrim.source.source import Source
from torchtrim.source.total import is_fresh, is_total, labels_of
from torchtrim.source.typed import Typed, holds, known_names, names_in, typed
from torchtrim.source.uses import loads

_FACT = "both ways give a tensor of one shape, type and device, that of the condition included"
_LINEAR_NAMES = """
    sum mean view reshape flatten permute transpose unsqueeze squeeze neg
"""
_LINEAR = frozenset(_LINEAR_NAMES.split())


def find(source: Source) -> Iterator[Match]:
    """Choices between values, with the names in them as parts."""
    for branch in branches(source):
        if any(not is_total(one, source) for one in branch.expressions):
            continue
        parts: dict[str, ast.expr] = {"C": branch.condition, "T": branch.then}
        parts |= operand_parts(branch.condition)
        if branch.other is not None:
            parts["E"] = branch.other
        computed = [one.value for one in origins(source, branch)]
        for expression in (branch.condition, *branch.expressions, *computed):
            for name in names_in(expression, source):
                parts.setdefault(f"N{len(parts)}", name)
        yield Match(fix=FIX, source=source, node=branch.test, parts=parts)


def write(match: Match, facts: Facts) -> Writing:
    """Both values, and the device's choice between them."""
    found = (one for one in branches(match.source) if one.test is match.node)
    plan = _Plan(match, next(found))
    _check_names(plan)
    for values in facts.executions:
        _look(plan, values, facts)
    if not facts.seen:
        _need_tensors(match, facts)
        _need_alike(plan)
    edits = tuple(_edits(plan))
    check_comments(match.source, edits)
    if plan.known:
        edits = _guarded(plan, edits)
    exact = not plan.then_safe and not plan.other_safe
    return Writing(edits, plan.risk, "BITWISE" if exact else "ROUNDING")


@dataclass
class _Plan:
    """What is found out about a place. `then_safe` and `other_safe` are the names to be made safe there."""

    match: Match
    branch: Branch
    then_safe: set[str] = field(default_factory=set)
    other_safe: set[str] = field(default_factory=set)
    known: list[Mapping[str, Seen]] = field(default_factory=list)
    numeric: set[int] = field(default_factory=set)
    risk: str = ""

    @property
    def source(self) -> Source:
        return self.match.source


# -- what must hold -------------------------------------------------------------------------------


def _check_names(plan: _Plan) -> None:
    source, branch = plan.source, plan.branch
    function = source.function(branch.test)
    if any(isinstance(one, ast.Constant) for one in (branch.then, branch.other)):
        raise Refused(
            "one way gives a number of Python's and the other a tensor. Write a tensor for the number, "
            "such as `torch.zeros_like(x)`, so that the device can choose"
        )
    then, other = _bound(branch.then_before), _bound(branch.other_before)
    if then & {one.id for one in _loaded((branch.other, *_values(branch.other_before)))}:
        raise Refused("a name that is assigned where it is true is used where it is not")
    for name in then | other:
        if isinstance(function, ast.Module) or not is_private(source, function, name):
            raise Refused(
                f"`{name}` would be assigned either way, and is seen outside of the function"
            )
    if (then | other) and _is_tried(source, branch.whole):
        raise Refused("a `try` around it may see names that would be assigned either way")
    made = [one for one in (branch.then, branch.other) if one is not None]
    whole = branch.other is not None and all(is_fresh(one, source) for one in made)
    if not whole and not _kept_apart(plan, function):
        raise Refused(
            "one way gives a tensor that has another name, and this would give a copy: what is written "
            "to it in place later would be lost. Write `.clone()` there if that is meant"
        )


def _kept_apart(plan: _Plan, function: ast.AST) -> bool:
    """Whether it makes no difference that the result is a copy."""
    source, branch = plan.source, plan.branch
    if branch.other is None and branch.target is not None:
        statement = source.statement(branch.whole)
        if was_fresh(source, branch.target, statement) and is_fresh(branch.then, source):
            return True
    if branch.target is None:
        return _read_where_it_stands(source, branch.whole)
    if isinstance(function, ast.Module) or not is_private(source, function, branch.target):
        return False
    return all(
        only_reads(source, use) or any(outer is branch.whole for outer in source.around(use))
        for use in loads(function, branch.target)
    )


def _read_where_it_stands(source: Source, node: ast.AST) -> bool:
    outer = source.parents[node]
    return isinstance(outer, ast.BinOp | ast.Compare)


def _look(plan: _Plan, values: Values, facts: Facts) -> None:
    """Compare both ways in one execution, by what was seen and what would have been."""
    branch, source = plan.branch, plan.source
    known = known_names(plan.match.parts, values)
    made = _bound((*branch.then_before, *branch.other_before))
    plan.known.append({name: one for name, one in known.items() if name not in made})
    device, numeric = seen_operands(plan.match, values, known)
    plan.numeric |= numeric
    then = typed(branch.then, source, known, branch.then_before)
    other = _other(branch, source, known)
    if not all(_holds(branch, source, known, guard) for guard in branch.guards):
        raise Refused("what it gives for the ranks that were seen is not what it gave")
    if then is None or other is None or not _seen_so(values, then, other):
        facts.leave_open(_FACT)
        return
    _compare(plan, values, then, other, device, known)


def _need_tensors(match: Match, facts: Facts) -> None:
    """Without a run, the source has to say that the condition is of tensors, and both ways are."""
    need_operands(match, facts)
    for part in (one for one in ("T", "E") if one in match.parts):
        need_tensor(facts, part, match.text(part))
    facts.leave_open(_FACT)


def _need_alike(plan: _Plan) -> None:
    """Require the source to show that both ways agree, since no run does."""
    branch, source = plan.branch, plan.source
    other = branch.other if branch.other is not None else ast.Name(branch.target or "", ast.Load())
    assigned = branch.then_before or branch.other_before or branch.guards
    form = None if assigned else common_form(branch.then, other, source)
    if form is None:
        raise Refused(
            "the source does not say that both ways give one type and shape, pass gradients to the same "
            "tensors and raise for the same inputs. Run the script under `torchtrim optimize --fix`, "
            "which looks"
        )
    curved = [not _linear(one, source) for one in (branch.then, other)]
    if any(curved) and form.reached and not _is_one_name(form, plan):
        raise Refused(
            "what is not chosen could make a gradient NaN, and the source does not say which of its "
            "operands are tensors. Run the script under `torchtrim optimize --fix`, which looks"
        )
    plan.then_safe |= form.reached if curved[0] else set()
    plan.other_safe |= form.reached if curved[1] else set()


def _is_one_name(form: Form, plan: _Plan) -> bool:
    """Whether its only operand is a name, which a safe copy can replace."""
    names = {ast.unparse(one) for one in plan.match.parts.values() if isinstance(one, ast.Name)}
    return len(form.operands) == 1 and form.operands <= names


def _holds(branch: Branch, source: Source, known: Mapping[str, Seen], guard: ast.expr) -> bool:
    """Whether a guard inside a way holds for what was seen, and so wherever ranks and types are these."""
    ways = (branch.then_before, branch.other_before)
    return any(holds(guard, source, known, before) for before in ways)


def _other(
    branch: Branch, source: Source, known: Mapping[str, Seen], before: Assigns = ()
) -> Typed | None:
    """What the other way gives: what the target was, if nothing."""
    if branch.other is not None:
        return typed(branch.other, source, known, (*before, *branch.other_before))
    if before and branch.target is not None:
        return typed(ast.Name(branch.target, ast.Load()), source, known, before)
    return _as_typed(known.get(branch.target or ""), branch.target)


def _reached(
    plan: _Plan, known: Mapping[str, Seen]
) -> tuple[frozenset[str], frozenset[str]] | None:
    """What the gradients of both ways reach, by way of names that were computed before."""
    branch, source = plan.branch, plan.source
    before = origins(source, branch)
    then = typed(branch.then, source, known, (*before, *branch.then_before))
    other = _other(branch, source, known, before)
    return (then.reached, other.reached) if then is not None and other is not None else None


def _compare(
    plan: _Plan,
    values: Values,
    then: Typed,
    other: Typed,
    device: str,
    known: Mapping[str, Seen],
) -> None:
    if (then.dtype, then.shape) != (other.dtype, other.shape):
        raise Refused(
            f"one way gives {then.dtype} of shape {list(then.shape)}, the other {other.dtype} of "
            f"{list(other.shape)}: which it is decides what can follow"
        )
    tensors = [one for one in known.values() if is_tensor(one)]
    if any(one.device != device for one in tensors):
        raise Refused("not all its tensors are on the device of its condition")
    if values.grad:
        reached = _reached(plan, known) or (then.reached, other.reached)
        if reached[0] != reached[1]:
            names = ", ".join(f"`{one}`" for one in sorted(reached[0] ^ reached[1]))
            plan.risk = (
                f"only one way passes a gradient to {names}, which would get zeros in place of none; "
                "an optimizer with momentum or weight decay tells them apart"
            )
        branch = plan.branch
        if not _linear(branch.then, plan.source) or branch.then_before:
            plan.then_safe |= then.reached
        if branch.other is not None and (
            not _linear(branch.other, plan.source) or branch.other_before
        ):
            plan.other_safe |= other.reached
    _protect_labels(plan, known)


def _protect_labels(plan: _Plan, known: Mapping[str, Seen]) -> None:
    """Class numbers must be in range where they are not chosen too: zeros are."""
    branch = plan.branch
    ways: list[tuple[ast.expr, set[str], Assigns]]
    ways = [(branch.then, plan.then_safe, branch.then_before)]
    if branch.other is not None:
        ways.append((branch.other, plan.other_safe, branch.other_before))
    for node, safe, before in ways:
        if any(labels_of(one, plan.source) for one in _values(before)):
            raise Refused("a loss over classes is in a statement before. Return it directly")
        for label in labels_of(node, plan.source):
            text = ast.unparse(label)
            if text in _bound(before) or not _is_integer(known.get(text)):
                raise Refused(
                    f"the class numbers `{text}` are computed there, and may be out of range"
                )
            safe.add(text)


def _is_integer(seen: Seen | None) -> bool:
    return seen is not None and is_tensor(seen) and seen.dtype.startswith(("int", "uint"))


def _seen_so(values: Values, then: Typed, other: Typed) -> bool:
    """Whether what ran was as it is computed here."""
    for part, computed in (("T", then), ("E", other)):
        seen = getattr(values, part, None)
        if seen is not None and (not is_tensor(seen) or (seen.dtype, seen.shape) != computed[:2]):
            return False
    return True


def _as_typed(seen: Seen | None, name: str | None) -> Typed | None:
    if seen is None or not is_tensor(seen) or name is None:
        return None
    return Typed(seen.dtype, seen.shape, frozenset([name] if seen.requires_grad else ()))


def _linear(node: ast.expr, source: Source) -> bool:
    """Whether its gradient does not depend on the tensors' values: sums and views times numbers."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Constant):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _linear(node.operand, source)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return _linear(node.left, source) and _linear(node.right, source)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        numbers = [one for one in sides if isinstance(one, ast.Constant)]
        return bool(numbers) and all(_linear(one, source) for one in sides)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = source.dotted(node.func) is None and node.func.attr in _LINEAR
        return method and _linear(node.func.value, source)
    return False


# -- what is written ------------------------------------------------------------------------------


def _edits(plan: _Plan) -> Iterator[Edit]:
    source, branch = plan.source, plan.branch
    torch, imports = torch_of(source)
    yield from imports
    condition = as_tensor(branch.condition, source, plan.numeric)
    lines: list[str] = []
    if plan.then_safe or plan.other_safe or branch.other_before or branch.then_before:
        name = fresh(source, branch.test, "chosen")
        lines.append(f"{name} = {_joined(condition)}")
        condition = name
    zero = f"{torch}.where({condition}, 0, {{}})"
    kept = f"{torch}.where({condition}, {{}}, 0)"
    if branch.turned:
        zero, kept = kept, zero
    safe_then = _safe(plan, plan.then_safe, "kept", kept, lines)
    safe_other = _safe(plan, plan.other_safe, "safe", zero, lines)
    then = _with(source, branch.then, safe_then)
    lines += [_with(source, one, safe_then) for one in branch.then_before]
    if _bound(branch.other_before) & {one.id for one in _loaded((branch.then,))}:
        early = fresh(source, branch.test, "taken")
        lines.append(f"{early} = {_joined(then)}")
        then = early
    other = branch.target or "" if branch.other is None else _with(source, branch.other, safe_other)
    pair = (other, then) if branch.turned else (then, other)
    text = f"{torch}.where({condition}, {pair[0]}, {pair[1]})"
    if isinstance(branch.whole, ast.IfExp):
        if lines:
            yield insert_before(source, branch.whole, "\n".join(lines))
        yield Edit(source.start(branch.whole), source.end(branch.whole), text)
    else:
        yield from _statement(plan, lines, text, safe_other)


def _guarded(plan: _Plan, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits for the ranks, types and relations of shapes that were seen."""
    source, branch = plan.source, plan.branch
    torch, imports = torch_of(source)
    tests = [f"{torch}.is_tensor({text})" for text in _perhaps_numbers(plan)]
    test = " and ".join([*tests, *filter(None, [kinds_seen(plan.known, torch)])])
    first = source.statement(branch.whole)
    if hasattr(first, "body") and first is not branch.whole:
        raise Refused("it is in the head of a statement that has a body. Give it a name first")
    last = branch.last or first
    returns = isinstance(branch.whole, ast.If) and branch.target is None
    inner = [one for one in edits if one not in imports]
    return (*imports, *guarded(source, inner, (first, last), test, returns=returns))


def _perhaps_numbers(plan: _Plan) -> list[str]:
    """Tensors by their text that another run may give another value, with which the original goes on."""
    branch, source = plan.branch, plan.source
    first = operands(branch.condition)[0]
    ways = [used_as_tensors(one, source) for one in (branch.then, branch.other) if one is not None]
    sure = used_as_tensors(first.node, source).union(set.intersection(*ways) if ways[1:] else ())
    seen = {text for known in plan.known for text, one in known.items() if is_tensor(one)}
    return sorted(seen - sure)


def _statement(
    plan: _Plan, lines: list[str], text: str, safe_other: Mapping[str, str]
) -> Iterator[Edit]:
    """The lines in the place of the `if`, and the choice there or in the place of the last return."""
    source, branch = plan.source, plan.branch
    assert isinstance(branch.whole, ast.If)
    blanks = source.indentation(branch.whole)
    if blanks is None:
        raise Refused("the statement shares its line with another. Give each its own line")
    if branch.last is None:
        lines = [*lines, *(_with(source, one, safe_other) for one in branch.other_before)]
        lines.append(f"{branch.target} = {text}" if branch.target else f"return {text}")
    start, end = source.start(branch.whole), source.end(branch.whole)
    kept = [
        one for one in comments(source.text[start:end]) if not any(one in line for line in lines)
    ]
    rest = source.text[end:].partition("\n")[0]
    if rest.strip() and not rest.strip().startswith("#"):
        raise Refused("the statement shares its line with another. Give each its own line")
    written = f"{source.newline}{blanks}".join([*kept, *lines])
    if not written:
        next_line = source.text.find("\n", end) + 1
        yield Edit(source.line_start(branch.whole.lineno), next_line, "")
    else:
        yield Edit(start, end, written)
    if branch.last is not None:
        for one in branch.other_before:
            new = _with(source, one, safe_other)
            if new != source.segment(one):
                yield Edit(source.start(one), source.end(one), new)
        assert branch.other is not None
        yield Edit(source.start(branch.last), source.end(branch.last), f"return {text}")


def _safe(
    plan: _Plan, names: Iterable[str], prefix: str, template: str, lines: list[str]
) -> dict[str, str]:
    """New names for tensors that are zero where they are not chosen, made in new lines."""
    given = {}
    for text in sorted(names):
        given[text] = fresh(plan.source, plan.branch.test, f"{prefix}_{text.replace('.', '_')}")
        lines.append(f"{given[text]} = {template.format(text)}")
    return given


def _with(source: Source, node: ast.AST, names: Mapping[str, str]) -> str:
    """The node's text with other names in it."""
    start, text = source.start(node), source.segment(node)
    found = [
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute)
        and isinstance(one.ctx, ast.Load)
        and ast.unparse(one) in names
    ]
    for one in sorted(found, key=source.start, reverse=True):
        at, to = source.start(one) - start, source.end(one) - start
        text = text[:at] + names[ast.unparse(one)] + text[to:]
    return text


def _joined(text: str) -> str:
    return f"({text})" if "\n" in text else text


# -- names ----------------------------------------------------------------------------------------


def _loaded(expressions: Iterable[ast.AST | None]) -> Iterator[ast.Name]:
    for expression in expressions:
        for node in ast.walk(expression) if expression is not None else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                yield node


def _bound(assigns: Assigns) -> set[str]:
    return {one.targets[0].id for one in assigns if isinstance(one.targets[0], ast.Name)}


def _values(assigns: Assigns) -> tuple[ast.expr, ...]:
    return tuple(one.value for one in assigns)


def _is_tried(source: Source, node: ast.AST) -> bool:
    for outer in source.around(node):
        if isinstance(outer, ast.Try):
            return True
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
    return False


FIX = Fix(codes=("TT101",), equivalence="ROUNDING", find=find, write=write)
