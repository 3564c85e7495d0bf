"""`if c: return a` and `return b` become one `torch.where(c, a, b)` if both are tensors of one shape.

A condition on the device makes the host wait to learn which branch to take. If both branches only compute a
tensor, both can be computed and the device chooses. This holds for two returns, for two assignments to one
name, for `a if c else b`, and for `if c: x = f(x)`.

Both must have one shape, type and device, use only functions that do not raise, synchronize or draw random
numbers whatever their inputs hold, and pass gradients to the same tensors. The branch not taken must not make
a gradient NaN: if its gradient depends on the tensors' values, zeros replace them first, since `where` after
it would multiply an infinity by zero.

Without a run, the fix is written only if the source shows that both branches agree in type, shape and
gradient and raise for the same inputs, as `x.exp()` and `x * 0.5` do.

`and`, `or`, `not` and chained comparisons of tensors become `&`, `|` and `~`, and all operands are computed.
Refused if an operand is a Python value, since a run shows only one of its outcomes: test it in an `if` of its
own.

Refused if the result was an existing tensor that may be written to afterwards. Suggested, not applied, if
only one branch passes gradients to a tensor: that tensor gets zeros instead of no gradient.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.dense import spliced
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, check_comments, comments
from torchtrim.rewriter.layout import width_of
from torchtrim.rewriter.replace import (
    SHARED_LINE,
    fresh,
    insert_before,
    need_indentation,
    torch_of,
)
from torchtrim.rewriter.truth import (
    as_tensor,
    need_operands,
    operand_parts,
    seen_operands,
)
from torchtrim.source.branches import Assigns, Branch, branches, origins
from torchtrim.source.facts import Facts, FixRefused, Values, is_tensor
from torchtrim.source.forms import match_form
from torchtrim.source.names import assigned_name, is_fresh_name, is_private, loads, only_reads
from torchtrim.source.nodes import find_all, name_set, names_in
from torchtrim.source.operations import VIEWS, is_fresh, is_total, labels_of
from torchtrim.source.source import Function, SourceFile
from torchtrim.source.typed import (
    TensorType,
    common_form,
    known_names,
    operands_in,
    typed,
)

_FACT = "both branches give tensors of one shape and type, on the condition's device"
_LINEAR = name_set("sum mean view reshape flatten permute transpose unsqueeze squeeze neg")


def _find(source: SourceFile) -> Iterator[Match]:
    for branch in branches(source):
        if not all(is_total(one, source) for one in branch.expressions):
            continue
        parts: dict[str, ast.expr] = {"C": branch.condition, "T": branch.then}
        parts |= operand_parts(branch.condition)
        if branch.other is not None:
            parts["E"] = branch.other
        computed = [assign.value for assign in origins(source, branch)]
        for expression in (branch.condition, *branch.expressions, *computed):
            for name in operands_in(expression, source):
                parts.setdefault(f"N{len(parts)}", name)
        yield Match(fix=FIX, source=source, node=branch.test, parts=parts)


def _write(match: Match, facts: Facts) -> Writing:
    plan = _Plan(match, next(one for one in branches(match.source) if one.test is match.node))
    _check_names(plan)
    for values in facts.executions:
        _look(plan, values, facts)
    if not facts.seen:
        need_operands(match, facts)
        for part in (name for name in ("T", "E") if name in match.parts):
            match.need(facts, part, "is a tensor", is_tensor, static=True)
        facts.leave_open(_FACT)
        _need_alike(plan)
    edits = tuple(_edits(plan))
    check_comments(match.source, edits)
    exact = not (plan.then_safe or plan.other_safe or plan.masks)
    return Writing(edits, plan.risk, "BITWISE" if exact else "ROUNDING")


@dataclass
class _Plan:
    """The replacement of one branch, with the names to make safe in each of its two values."""

    match: Match
    branch: Branch
    then_safe: set[str] = field(default_factory=set)
    other_safe: set[str] = field(default_factory=set)
    numeric: set[int] = field(default_factory=set)
    masks: set[ast.Assign] = field(default_factory=set)
    risk: str = ""

    @property
    def source(self) -> SourceFile:
        return self.match.source


# -- what must hold -------------------------------------------------------------------------------


def _check_names(plan: _Plan) -> None:
    source, branch = plan.source, plan.branch
    function = source.function(branch.test)
    if any(isinstance(one, ast.Constant) for one in (branch.then, branch.other)):
        raise FixRefused(
            "one branch gives a Python number. Write a tensor for it, such as `torch.zeros_like(x)`"
        )
    then, other = _bound(branch.then_before), _bound(branch.other_before)
    if then & _loaded(branch.other, *(assign.value for assign in branch.other_before)):
        raise FixRefused("a name assigned in one branch is used in the other")
    for name in then | other:
        if isinstance(function, ast.Module) or not is_private(source, function, name):
            raise FixRefused(
                f"`{name}` would always be assigned, and code outside the function sees it"
            )
    inner = takewhile(lambda outer: not isinstance(outer, Function), source.around(branch.whole))
    if (then | other) and any(isinstance(outer, ast.Try) for outer in inner):
        raise FixRefused("a `try` around it may see names that would now always be assigned")
    values = (branch.then, branch.other)
    fresh_values = all(one is not None and is_fresh(one, source) for one in values)
    if not fresh_values and not _kept_apart(plan, function):
        raise FixRefused(
            "later in-place writes to one branch's tensor would be lost. Write `.clone()` there "
            "if a copy is right"
        )


def _kept_apart(plan: _Plan, function: ast.AST) -> bool:
    """Return True if code after the branch cannot tell the result from a copy."""
    source, branch = plan.source, plan.branch
    if branch.other is None and branch.target is not None:
        statement = source.statement(branch.whole)
        if is_fresh_name(source, branch.target, statement) and is_fresh(branch.then, source):
            return True
    if branch.target is None:
        return isinstance(source.parents[branch.whole], ast.BinOp | ast.Compare)
    if isinstance(function, ast.Module) or not is_private(source, function, branch.target):
        return False
    return all(
        only_reads(source, use) or any(outer is branch.whole for outer in source.around(use))
        for use in loads(function, branch.target)
    )


def _look(plan: _Plan, values: Values, facts: Facts) -> None:
    """Compare both values in one execution: the observed one and the inferred one."""
    branch, source = plan.branch, plan.source
    known = known_names(plan.match.parts, values)
    device, numeric = seen_operands(plan.match, values, known)
    plan.numeric |= numeric
    then = typed(branch.then, source, known, branch.then_before)
    other = _other(branch, source, known)
    if then is None or other is None:
        facts.leave_open(_FACT)
        return
    for part, computed in (("T", then), ("E", other)):
        seen = getattr(values, part, None)
        if seen is not None and (not is_tensor(seen) or (seen.dtype, seen.shape) != computed[:2]):
            facts.leave_open(_FACT)
            return
    _compare(plan, values, then, other, device, known)


def _need_alike(plan: _Plan) -> None:
    """Require the source to show that both values agree, since no run does."""
    branch, source = plan.branch, plan.source
    other = branch.other if branch.other is not None else ast.Name(branch.target or "", ast.Load())
    assigned = branch.then_before or branch.other_before
    form = None if assigned else common_form(branch.then, other, source)
    if form is None:
        raise FixRefused(
            "the source does not show that both branches agree in type, shape and gradient. Run "
            "`torchtrim optimize --fix`"
        )
    curved = [not _linear(one, source) for one in (branch.then, other)]
    names = {ast.unparse(one) for one in plan.match.parts.values() if isinstance(one, ast.Name)}
    one_name = len(form.operands) == 1 and form.operands <= names  # a safe copy can replace it
    if any(curved) and form.reached and not one_name:
        raise FixRefused(
            "the branch not taken could make a gradient NaN. Run `torchtrim optimize --fix`, "
            "which observes its tensors"
        )
    plan.then_safe |= form.reached if curved[0] else set()
    plan.other_safe |= form.reached if curved[1] else set()


def _other(
    branch: Branch, source: SourceFile, known: Mapping[str, ObservedValue], before: Assigns = ()
) -> TensorType | None:
    """Return the other value; the target's old value if there is none."""
    if branch.other is not None:
        return typed(branch.other, source, known, (*before, *branch.other_before))
    if before and branch.target is not None:
        return typed(ast.Name(branch.target, ast.Load()), source, known, before)
    seen = known.get(branch.target or "")
    if seen is None or not is_tensor(seen) or branch.target is None:
        return None
    reached = frozenset([branch.target] if seen.requires_grad else ())
    return TensorType(seen.dtype, seen.shape, reached)


def _reached(
    plan: _Plan, known: Mapping[str, ObservedValue]
) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the tensors that the gradients of both values reach, through names computed before."""
    branch, source = plan.branch, plan.source
    before = origins(source, branch)
    then = typed(branch.then, source, known, (*before, *branch.then_before))
    other = _other(branch, source, known, before)
    return (then.reached, other.reached) if then is not None and other is not None else None


def _compare(
    plan: _Plan,
    values: Values,
    then: TensorType,
    other: TensorType,
    device: str,
    known: Mapping[str, ObservedValue],
) -> None:
    if (then.dtype, then.shape) != (other.dtype, other.shape):
        raise FixRefused(
            f"one branch gives {then.dtype} of shape {list(then.shape)}, the other {other.dtype} of "
            f"{list(other.shape)}, and later code may depend on which"
        )
    if any(is_tensor(seen) and seen.device != device for seen in known.values()):
        raise FixRefused("some of its tensors are not on the device of its condition")
    if values.grad:
        reached = _reached(plan, known) or (then.reached, other.reached)
        if reached[0] != reached[1]:
            names = ", ".join(f"`{name}`" for name in sorted(reached[0] ^ reached[1]))
            plan.risk = (
                f"only one branch passes a gradient to {names}, which would get zeros instead of none; "
                "optimizers with momentum or weight decay distinguish the two"
            )
        branch = plan.branch
        if not _linear(branch.then, plan.source) or branch.then_before:
            plan.then_safe |= then.reached
        if branch.other is not None and (
            not _linear(branch.other, plan.source) or branch.other_before
        ):
            plan.other_safe |= other.reached
    _protect_labels(plan, known)


def _protect_labels(plan: _Plan, known: Mapping[str, ObservedValue]) -> None:
    """Keep class labels in range in the branch not taken, by zeros."""
    branch = plan.branch
    ways = (
        (branch.then, plan.then_safe, branch.then_before),
        (branch.other, plan.other_safe, branch.other_before),
    )
    for node, safe, before in ways:
        if any(labels_of(assign.value, plan.source) for assign in before):
            raise FixRefused(
                "an earlier statement computes a classification loss. Return it directly"
            )
        for label in labels_of(node, plan.source) if node is not None else ():
            text = ast.unparse(label)
            seen = known.get(text)
            integers = seen and is_tensor(seen) and seen.dtype.startswith(("int", "uint"))
            if text in _bound(before) or not integers:
                raise FixRefused(
                    f"the class indices `{text}` are computed there, and may be out of range"
                )
            safe.add(text)
        for mask in before:
            _protect_by_mask(plan, mask, safe, [node, *(assign.value for assign in before)])


def _protect_by_mask(
    plan: _Plan, mask: ast.Assign, safe: set[str], trees: Sequence[ast.expr | None]
) -> None:
    """Let a mask select nothing in the branch not taken, which protects what is filled outside it."""
    name = assigned_name(mask)
    if name is None or not isinstance(mask.value, ast.Compare):
        return
    others = [tree for tree in trees if tree is not None and tree is not mask.value]
    uses = [use for tree in others for use in find_all(tree, ast.Name)]
    for text in list(safe):
        own = [use for use in uses if use.id == text]
        if own and all(_is_filled(plan.source, use, name) for use in own):
            safe.remove(text)
            plan.masks.add(mask)


def _is_filled(source: SourceFile, use: ast.Name, mask: str) -> bool:
    """Return True for the tensor of `x.t().masked_fill(~mask, 0)` or `torch.where(mask, x, 0)`."""
    forms = (
        *(f"X.masked_fill(~{mask}, C)", f"X.masked_fill(~{mask}.unsqueeze(N), C)"),
        f"torch.where({mask}, X, C)",
    )
    node: ast.AST = use
    while isinstance(outer := source.parents[node], ast.Attribute) and outer.attr in VIEWS:
        node = source.parents[outer]
    found = (
        match_form(form, one, source) for form in forms for one in (outer, source.parents[outer])
    )
    return any(one is not None and one.parts["X"] is node for one in found)


def _linear(node: ast.expr, source: SourceFile) -> bool:
    """Return True if the gradient does not depend on the tensors' values: sums and views times numbers."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Constant):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _linear(node.operand, source)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return _linear(node.left, source) and _linear(node.right, source)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = (node.left, node.right)
        scaled = any(isinstance(side, ast.Constant) for side in sides)
        return scaled and all(_linear(side, source) for side in sides)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = source.dotted(node.func) is None and node.func.attr in _LINEAR
        return method and _linear(node.func.value, source)
    return False


# -- what is written ------------------------------------------------------------------------------


def _edits(plan: _Plan) -> Iterator[TextEdit]:
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
    if branch.negated:
        zero, kept = kept, zero
    safe_then = _safe(plan, plan.then_safe, "kept", kept, lines)
    safe_other = _safe(plan, plan.other_safe, "safe", zero, lines)
    then = _with(source, branch.then, safe_then)
    taken, left = (f"~{condition}", condition) if branch.negated else (condition, f"~{condition}")
    lines += [_assignment(plan, assign, safe_then, taken) for assign in branch.then_before]
    if _bound(branch.other_before) & _loaded(branch.then):
        early = fresh(source, branch.test, "other")
        lines.append(f"{early} = {_joined(then)}")
        then = early
    other = branch.target or "" if branch.other is None else _with(source, branch.other, safe_other)

    def choice(one: str, two: str) -> str:
        pair = (two, one) if branch.negated else (one, two)
        return f"{torch}.where({condition}, {pair[0]}, {pair[1]})"

    if isinstance(branch.whole, ast.IfExp):
        if lines:
            yield insert_before(source, branch.whole, "\n".join(lines))
        yield TextEdit.of(source, branch.whole, choice(then, other))
        return
    head = f"{branch.target} = " if branch.target else "return "
    last = [f"{head}{choice(then, other)}"]
    if branch.other is not None and _is_too_long(source, branch.whole, last[0]):
        name = "loss" if labels_of(branch.other, source) else "other"
        name = fresh(source, branch.test, name)
        last = [f"{name} = {_joined(other)}", f"{head}{choice(then, name)}"]
    others = [_assignment(plan, assign, safe_other, left) for assign in branch.other_before]
    yield from _statement(plan, lines, last, others)


def _statement(
    plan: _Plan, lines: list[str], last: list[str], others: list[str]
) -> Iterator[TextEdit]:
    """Return the lines that replace the `if`, and the choice there or in place of the last return."""
    source, branch = plan.source, plan.branch
    assert isinstance(branch.whole, ast.If)
    blanks = need_indentation(source, branch.whole)
    if branch.last is None:
        lines = [*lines, *others, *last]
    start, end = source.start(branch.whole), source.end(branch.whole)
    new = "\n".join(lines)
    kept = [comment for comment in comments(source.text[start:end]) if comment not in new]
    rest = source.text[end:].partition("\n")[0]
    if rest.strip() and not rest.strip().startswith("#"):
        raise FixRefused(SHARED_LINE)
    written = f"{source.newline}{blanks}".join([*kept, *lines])
    if not written:
        yield TextEdit(source.line_start(branch.whole.lineno), source.text.find("\n", end) + 1, "")
    else:
        yield TextEdit(start, end, written)
    if branch.last is not None:
        for assign, new in zip(branch.other_before, others, strict=True):
            if new != source.segment(assign):
                yield TextEdit.of(source, assign, new)
        yield TextEdit.of(source, branch.last, f"{source.newline}{blanks}".join(last))


def _safe(
    plan: _Plan, names: Iterable[str], prefix: str, template: str, lines: list[str]
) -> dict[str, str]:
    """Return new names for tensors with zeros where they are not chosen; add the lines that create them."""
    new = {}
    for text in sorted(names):
        new[text] = fresh(plan.source, plan.branch.test, f"{prefix}_{text.replace('.', '_')}")
        lines.append(f"{new[text]} = {template.format(text)}")
    return new


def _assignment(plan: _Plan, assign: ast.Assign, names: Mapping[str, str], taken: str) -> str:
    """Return an assignment of a branch; `taken` is the text of whether the branch is taken."""
    if assign not in plan.masks:
        return _with(plan.source, assign, names)
    return f"{assigned_name(assign)} = {taken} & ({_with(plan.source, assign.value, names)})"


def _with(source: SourceFile, node: ast.AST, names: Mapping[str, str]) -> str:
    """Return the node's text with other names for some of the tensors that it reads."""
    texts: dict[ast.AST, str] = {
        part: names[text]
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
        and isinstance(part.ctx, ast.Load)
        and (text := ast.unparse(part)) in names
    }
    return spliced(source, node, texts)


def _joined(text: str) -> str:
    """Return an expression, in parentheses if a line of it ends outside brackets."""
    try:
        whole = len(ast.parse(f"_ = {text}").body) == 1
    except SyntaxError:
        whole = False
    return text if whole else f"({text})"


def _is_too_long(source: SourceFile, statement: ast.stmt, line: str) -> bool:
    blanks = source.indentation(statement) or ""
    return "\n" in line or len(blanks + line) > width_of(source.text)


# -- names ----------------------------------------------------------------------------------------


def _loaded(*expressions: ast.expr | None) -> set[str]:
    return set().union(*(names_in(one) for one in expressions if one is not None))


def _bound(assigns: Assigns) -> set[str]:
    return {name for assign in assigns if (name := assigned_name(assign))}


FIX = Fix(codes=("TT101",), equivalence="ROUNDING", find=_find, write=_write)
