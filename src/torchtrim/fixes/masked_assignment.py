"""`x[mask] = v` becomes `x.copy_(torch.where(mask, v, x))`, which writes in place without counting.

An assignment by a mask, of a value that is on the device, is turned into one by indices first, and
the host waits to learn how many. All elements can be written instead, those that are not selected with
what they hold. It is written in the same memory, so views and other names of the tensor see it as
before. The value may be one number on the device, a row, or an elementwise expression of
selections by the same mask: `y[mask] = x[mask].exp()`, `x[mask] += c`, `x[mask] *= y[mask]`. Where
gradients flow, what is not selected is kept out of the computation, so that a NaN there does not come
back as a gradient; the gradient of a number or a row is summed in another order, and the last bit of
`exp` and its like may depend on an element's position. A value that has a row
for each selected element says how many there are:
`x[torch.nonzero_static(mask, size=len(v)).unbind(1)] = v`.

With `x[mask] = v` a `v` may be a row for all or hold a row for each, and a mask may cover fewer dimensions
of `x`: which it is decides how it is written. So the ranks that were seen are tested for, which needs no
sync, and for others the original assignment is kept.

Without a run the source has to say that the mask has all dimensions of the tensor, as `x > 0` has those of
`x`. Refused where the value has another type than the tensor, or is elsewhere; where it has a single row,
which may stand for one selected element or for all of them; and where something with an effect would
run at another time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.rewriter.dense import Dense, hoisted, is_own
from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.guarded import guarded, kinds_tested, of_same_rank
from torchtrim.rewriter.replace import atom, check_comments, torch_of
from torchtrim.source.facts import (
    Facts,
    Refused,
    Values,
    is_floating,
    is_mask,
    is_number,
    is_tensor,
)
from torchtrim.source.purity import is_pure
from torchtrim.source.selections import (
    Part,
    Selection,
    Tree,
    mask_of_index,
    need_fit,
    read_tree,
    tensor_part,
    trailing,
)
from torchtrim.source.source import Source

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


class _Assignment(NamedTuple):
    """`target[mask] = value`, or with an operator. `tree`: of the value, the target's own leaf first."""

    node: ast.Assign | ast.AugAssign
    target: ast.expr
    mask: ast.expr
    value: ast.expr
    sign: str
    tree: Tree


def find(source: Source) -> Iterator[Match]:
    """The assignments by what may be a mask."""
    for node in source.at({(ast.Assign, ""), (ast.AugAssign, "")}):
        found = _read(node, source)
        if found is not None:
            parts = {**found.tree.parts(), "V": found.value}
            yield Match(fix=FIX, source=source, node=node, parts=parts, syncs=found.tree.syncs)


def _read(node: ast.AST, source: Source) -> _Assignment | None:
    sign = ""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        target, sign = node.target, _OPERATORS[type(node.op)]
    else:
        return None
    if not isinstance(target, ast.Subscript) or (isinstance(node.value, ast.Constant) and not sign):
        return None
    mask = mask_of_index(target.slice)
    if mask is None:
        return None
    tree = read_tree(node.value, source, mask=mask)
    if tree is None:
        tree = Tree(
            mask, operands=[] if isinstance(node.value, ast.Constant) else [Part(node.value, 0)]
        )
    tree.leaves.insert(0, (Selection(target, target.value, mask), 0))
    return _Assignment(node, target.value, mask, node.value, sign, tree)


def write(match: Match, facts: Facts) -> Writing:
    """The same values in the same memory."""
    found = _read(match.node, match.source)
    assert found is not None
    facts.need(
        f"`{match.text('M')}` is a boolean mask of the shape that `{match.text('X')}` begins with, on the "
        "same device",
        lambda v: is_mask(v.M, v.X),
    )
    plain = len(found.tree.leaves) == 1
    if plain and not found.sign and facts.holds(lambda v: is_number(v.V)):
        raise Refused(
            "a number of Python's is written by a mask without a wait; what waits is beside it"
        )
    if plain and facts.holds(
        lambda v: is_tensor(v.V) and len(v.V.shape) == 1 + trailing(v, found.tree)
    ):
        return _packed(match, facts, found)
    return _dense(match, facts, found)


def _dense(match: Match, facts: Facts, found: _Assignment) -> Writing:
    source = match.source
    need_fit(facts, found.tree, source)
    _check_told(match, facts, found)
    facts.need(_what(match, found), lambda v: _has_type(v, found.sign))
    _check_order(source, found)
    torch, imports = torch_of(source)
    dense = Dense(match, facts, found.tree, at=found.node, torch=torch)
    target, before = hoisted(source, found.target, "target", at=found.node)
    dense.flows = dense.flows and (bool(found.sign) or not _alone(found))
    value = dense.text(found.value)
    if found.sign:
        value = f"{_guarded_target(dense, target)} {found.sign} {_operand(value, found.value)}"
    text = f"{target}.copy_({dense.kept(value, target)})"
    edit = Edit(source.start(found.node), source.end(found.node), text)
    edits = (*before, *dense.edits, *imports, edit)
    check_comments(source, edits)
    if test := kinds_tested(match, facts, _tested(source, found, target, dense.mask), torch):
        (kept,) = guarded(source, (edit,), (found.node, found.node), test)
        edits = (*before, *dense.edits, *imports, kept)
    exact = not found.tree.rounded and facts.holds(lambda v: not _sums_gradients(v, found.tree))
    return Writing(edits, equivalence=None if exact else "ROUNDING")


def _check_told(match: Match, facts: Facts, found: _Assignment) -> None:
    """Without a run, a tensor beside the selections must have no dimensions: it may be a selection too."""
    for number in range(len(found.tree.operands)):
        part = f"C{number}"
        single = facts.is_told(lambda v, part=part: not getattr(v, part).shape)  # type: ignore[misc]
        if facts.is_told(lambda v, part=part: is_tensor(getattr(v, part))) and not single:  # type: ignore[misc]
            raise Refused(
                f"`{match.text(part)[:60]}` may have a row for each selected element. Run the script under "
                "`torchtrim optimize --fix`, which looks"
            )


def _tested(source: Source, found: _Assignment, target: str, mask: str) -> dict[str, str]:
    """What has ranks that decide, by part."""
    names = {"X": target, "M": mask}
    parts = [(f"C{n}", operand.node) for n, operand in enumerate(found.tree.operands)]
    leaves = enumerate(found.tree.leaves)
    parts += [(tensor_part(n), leaf.tensor) for n, (leaf, _) in leaves if n]
    return names | {part: of_same_rank(source, node) for part, node in parts}


def _sums_gradients(values: Values, tree: Tree) -> bool:
    """Whether gradients of several elements are added up, which goes in another order then."""
    leaves = [getattr(values, tensor_part(n)) for n in range(len(tree.leaves))]
    apart = all(leaf.shape == values.X.shape for leaf in leaves)
    operands = [getattr(values, f"C{n}") for n in range(len(tree.operands))]
    return values.grad and any(
        one.requires_grad for one in (operands if apart else operands + leaves)
    )


def _packed(match: Match, facts: Facts, found: _Assignment) -> Writing:
    source, value = match.source, match.text("V")
    facts.need(
        f"`{value[:60]}` is of the tensor's type and has a row for each selected element, and not one row, "
        "which could stand for all",
        lambda v: v.V.dtype == v.X.dtype and v.V.device == v.X.device and v.V.shape[0] != 1,
    )
    if found.sign and not (is_pure(found.value, source) and is_pure(found.target, source)):
        raise Refused("the expression there may do more than compute a value. Give it a name first")
    if any(isinstance(outer, ast.Try) and outer.handlers for outer in source.around(found.node)):
        raise Refused("the error of a value with too many or too few rows may be caught around it")
    torch, imports = torch_of(source)
    rows, before = hoisted(source, found.value, "rows", at=found.node)
    index = f"{torch}.nonzero_static({match.text('M')}, size=len({rows})).unbind(1)"
    text = f"{atom(source, found.target)}[{index}] {found.sign}= {rows}"
    edit = Edit(source.start(found.node), source.end(found.node), text)
    names = {"X": found.target, "M": found.mask}
    texts = {part: of_same_rank(source, node) for part, node in names.items()} | {"V": rows}
    test = kinds_tested(match, facts, texts, torch)
    if test:
        kept = [Edit(source.start(found.value), source.end(found.value), rows)] if before else []
        span = (found.node, found.node)
        (edit,) = guarded(source, (edit,), span, f"{test} and {rows}.shape[0] != 1", kept=kept)
    edits = (*before, *imports, edit)
    check_comments(source, edits)
    return Writing(edits)


def _alone(found: _Assignment) -> bool:
    """Whether the value is a selection or an operand as written, with nothing computed."""
    inner = [leaf.node for leaf, _ in found.tree.leaves] + [
        part.node for part in found.tree.operands
    ]
    return any(one is found.value for one in inner)


def _guarded_target(dense: Dense, target: str) -> str:
    return dense.leaf(0, name=target)


def _operand(text: str, node: ast.expr) -> str:
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)
    return text if simple else f"({text})"


def _what(match: Match, found: _Assignment) -> str:
    return f"`{match.text('V')[:60]}` is of the type of `{match.text('X')}`, on the same device"


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


def _check_order(source: Source, found: _Assignment) -> None:
    """Raises `Refused` where the value may change what the target, or its elements, are."""
    named = is_own(source, found.target) and not found.sign
    if not is_pure(found.target, source) or not (named or is_pure(found.value, source)):
        raise Refused(
            "the expression there may do more than compute a value, and would run at another time. Give "
            "the value a name first"
        )


FIX = Fix(codes=("TT102",), equivalence="BITWISE", find=find, write=write)
