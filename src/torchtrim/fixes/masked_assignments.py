"""Assignments by a boolean mask, or by its indices."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.rewriter.dense import Dense, hoisted
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, check_comments, of_forms
from torchtrim.rewriter.replace import atom, replace, torch_of
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    Values,
    is_floating,
    is_integral,
    is_mask,
    is_number,
    is_tensor,
    of_part,
    without_grad,
)
from torchtrim.source.operations import is_pure
from torchtrim.source.selections import (
    Selection,
    Tree,
    TreeInput,
    mask_of_index,
    need_fit,
    read_tree,
    tensor_part,
    trailing,
)
from torchtrim.source.source import SourceFile

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class _Assignment(NamedTuple):
    """An assignment `target[mask] = value`, or with an operator. The tree's first leaf is the target."""

    node: ast.Assign | ast.AugAssign
    target: ast.expr
    mask: ast.expr
    value: ast.expr
    sign: str
    tree: Tree


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.at({(ast.Assign, ""), (ast.AugAssign, "")}):
        if found := _read(node, source):
            parts, syncs = {**found.tree.parts(), "V": found.value}, found.tree.syncs
            yield Match(fix=MASKED_ASSIGNMENT, source=source, node=node, parts=parts, syncs=syncs)


def _read(node: ast.AST, source: SourceFile) -> _Assignment | None:
    sign = ""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        target, sign = node.target, _OPERATORS[type(node.op)]
    else:
        return None
    if not isinstance(target, ast.Subscript) or (isinstance(node.value, ast.Constant) and not sign):
        return None
    if (mask := mask_of_index(target.slice)) is None:
        return None
    if (tree := read_tree(node.value, source, mask=mask)) is None:
        other = [] if isinstance(node.value, ast.Constant) else [TreeInput(node.value, 0)]
        tree = Tree(mask, operands=other)
    tree.leaves.insert(0, (Selection(target, target.value, mask), 0))
    return _Assignment(node, target.value, mask, node.value, sign, tree)


def _write_masked_assignment(match: Match, facts: Facts) -> Writing:
    found = _read(match.node, match.source)
    assert found is not None
    facts.need(
        f"`{match.text('M')}` is a boolean mask whose shape starts that of `{match.text('X')}`, on the "
        "same device",
        lambda v: is_mask(v.M, v.X),
    )
    plain = len(found.tree.leaves) == 1
    if plain and not found.sign and facts.holds(lambda v: is_number(v.V)):
        raise FixRefused(
            "an assignment of a Python number by a mask does not wait; another part of the line does"
        )
    if plain and facts.holds(
        lambda v: is_tensor(v.V) and len(v.V.shape) == 1 + trailing(v, found.tree)
    ):
        return _packed(match, facts, found)
    return _dense(match, facts, found)


def _dense(match: Match, facts: Facts, found: _Assignment) -> Writing:
    source = match.source
    need_fit(facts, found.tree, source)
    _check_apart(match, facts, found)
    facts.need(
        f"`{match.text('V')[:60]}` has the type and device of `{match.text('X')}`",
        lambda v: _has_type(v, found.sign),
    )
    _check_order(source, found)
    torch, imports = torch_of(source)
    dense = Dense(match, facts, found.tree, at=found.node, torch=torch)
    target, before = hoisted(source, found.target, "target", at=found.node)
    leaves = [leaf.node for leaf, _ in found.tree.leaves]
    alone = found.value in [*leaves, *(operand.node for operand in found.tree.operands)]
    dense.flows = dense.flows and (bool(found.sign) or not alone)
    value = dense.text(found.value)
    if found.sign:
        simple = ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript
        value = value if isinstance(found.value, simple) else f"({value})"
        value = f"{dense.leaf(0, name=target)} {found.sign} {value}"
    edit = TextEdit.of(source, found.node, f"{target}.copy_({dense.kept(value, target)})")
    edits = (*before, *dense.edits, *imports, edit)
    check_comments(source, edits)
    exact = not found.tree.rounded and facts.holds(lambda v: not _sums_gradients(v, found.tree))
    return Writing(edits, equivalence=None if exact else "ROUNDING")


def _check_apart(match: Match, facts: Facts, found: _Assignment) -> None:
    """Require, without a run, that other operands have zero dimensions: they may be selections too."""
    for number in range(len(found.tree.operands)):
        part = f"C{number}"
        single = facts.holds_statically(of_part(part, lambda seen: not seen.shape))
        if facts.holds_statically(of_part(part, is_tensor)) and not single:
            raise FixRefused(
                f"`{match.text(part)[:60]}` may have a row for each selected element. Run the script under "
                "`torchtrim optimize --fix`, which observes it"
            )


def _sums_gradients(values: Values, tree: Tree) -> bool:
    """Return True if gradients of several elements are summed: the fix changes the order of that sum."""
    leaves = [getattr(values, tensor_part(n)) for n in range(len(tree.leaves))]
    summed = [getattr(values, f"C{n}") for n in range(len(tree.operands))]
    if any(leaf.shape != values.X.shape for leaf in leaves):
        summed += leaves
    return not without_grad(values, *summed)


def _packed(match: Match, facts: Facts, found: _Assignment) -> Writing:
    source, value = match.source, match.text("V")
    facts.need(
        f"`{value[:60]}` has the tensor's type and a row for each selected element, not a single row, "
        "which could apply to all",
        lambda v: v.V.dtype == v.X.dtype and v.V.device == v.X.device and v.V.shape[0] != 1,
    )
    if found.sign and not (is_pure(found.value, source) and is_pure(found.target, source)):
        raise FixRefused("the expression may have a side effect. Assign it to a name first")
    if any(isinstance(outer, ast.Try) and outer.handlers for outer in source.around(found.node)):
        raise FixRefused(
            "surrounding code may catch the error for a value with too many or too few rows"
        )
    torch, imports = torch_of(source)
    rows, before = hoisted(source, found.value, "rows", at=found.node)
    index = f"{torch}.nonzero_static({match.text('M')}, size=len({rows})).unbind(1)"
    text = f"{atom(source, found.target)}[{index}] {found.sign}= {rows}"
    edit = TextEdit.of(source, found.node, text)
    return Writing((*before, *imports, edit))


def _has_type(values: Values, sign: str) -> bool:
    if is_number(values.V):
        whole = (
            values.V.kind == "int" and sign != "/" and values.X.dtype.startswith(("int", "uint"))
        )
        return is_floating(values.X) or whole
    if not is_tensor(values.V) or values.V.device != values.X.device:
        return False
    allowed = not sign or (values.X.dtype != "bool" and (sign != "/" or is_floating(values.X)))
    return allowed and values.V.dtype == values.X.dtype


def _check_order(source: SourceFile, found: _Assignment) -> None:
    """Raise `FixRefused` if evaluating the value may change the target or its elements."""
    if not (is_pure(found.target, source) and is_pure(found.value, source)):
        raise FixRefused(
            "the expression may have a side effect, and would run at another time. Assign "
            "the value to a name first"
        )


MASKED_ASSIGNMENT: Fix = Fix(
    name="masked_assignment",
    doc="""`x[mask] = v` becomes `x.copy_(torch.where(mask, v, x))`, which writes in place without counting.

    PyTorch turns an assignment by a mask, of a value on the device, into one by indices, and the host waits
    to learn how many there are. Instead, all elements can be written: unselected ones get their own value.
    The same memory is written, so views and other names of the tensor see the change. The value may be a
    number on the device, a row, or an elementwise expression of selections by the same mask: `y[mask] =
    x[mask].exp()`, `x[mask] += c`, `x[mask] *= y[mask]`. Where gradients flow, unselected elements are kept
    out of the computation, so that a NaN in one does not become a gradient. The gradient of a number or a row
    is summed in another order, and the last bit of functions such as `exp` may depend on an element's
    position. A value with a row for each selected element shows how many there are:
    `x[torch.nonzero_static(mask, size=len(v)).unbind(1)] = v`.

    Without a run, the source has to show that the mask has all dimensions of the tensor, as `x > 0` has those
    of `x`. Refused if the value has another type or device than the tensor; if it has a single row, which may
    apply to one selected element or for all of them; and if the timing of a side effect would change.
    """,
    codes=("TT102",),
    equivalence="BITWISE",
    find=_find,
    write=_write_masked_assignment,
)


FORMS = (
    "X[M.nonzero(as_tuple=True)] = C",
    "X[torch.nonzero(M, as_tuple=True)] = C",
    "X[torch.where(M)] = C",
)


def _write_masked_fill(match: Match, facts: Facts) -> Writing:
    facts.need(
        f"`{match.text('M')}` is a tensor whose shape starts that of `{match.text('X')}`",
        lambda v: (
            is_tensor(v.M, v.X)
            and len(v.M.shape) > 0
            and v.X.shape[: len(v.M.shape)] == v.M.shape
            and v.M.device == v.X.device
        ),
    )
    match.need(facts, "C", "is a Python number", is_number)
    if not isinstance(match.parts["M"], ast.Compare):
        match.need(facts, "M", "contains integers or booleans", is_integral)
        return Writing(replace(match, "X[M != 0] = C"))
    return Writing(replace(match, "X[M] = C"))


MASKED_FILL: Fix = Fix(
    name="masked_fill",
    doc="""`x[mask.nonzero(as_tuple=True)] = 0` becomes `x[mask] = 0`, which fills in place without counting.

    `nonzero` returns as many indices as the mask has true elements, so the host waits to learn how many.
    PyTorch dispatches an assignment of a Python number by one boolean mask to `masked_fill_`, which does not
    count. The same memory is written, so views and other names of the tensor see the change.

    Refused if the shapes did not fit in the run, since indices are less strict than a mask, and if the value
    is a tensor.
    """,
    codes=("TT102", "TT103"),
    equivalence="BITWISE",
    find=of_forms(lambda: MASKED_FILL, *FORMS),
    write=_write_masked_fill,
)


FIXES = (MASKED_ASSIGNMENT, MASKED_FILL)
