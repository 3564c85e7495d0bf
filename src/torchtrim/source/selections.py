"""Selections by a mask, `x[mask]`, and elementwise expressions of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.source.facts import Facts, Values, is_mask, is_number, is_tensor
from torchtrim.source.forms import equal, match_form
from torchtrim.source.nodes import constant_of, inverted, keywords_of, name_set, names_in
from torchtrim.source.ranks import covers
from torchtrim.source.source import SourceFile

_FORMS = (
    "torch.masked_select(X, M)",
    "X.masked_select(M)",
    "X[torch.where(M)]",
    "X[M.nonzero(as_tuple=True)]",
    "X[torch.nonzero(M, as_tuple=True)]",
)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.BitAnd, ast.BitOr, ast.BitXor)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_CASTS = name_set("float double half bfloat16 long int bool")
_ELEMENTWISE = _CASTS | name_set("""
    abs absolute acos add asin atan atan2 ceil clamp clamp_max clamp_min clip clone cos cosh
    detach div divide eq erf exp exp2 expm1 floor ge greater gt hypot isfinite isinf isnan le less
    log log10 log1p log2 logical_and logical_not logical_or logical_xor logit lt maximum minimum
    mul multiply nan_to_num ne neg negative pow reciprocal relu round rsqrt sigmoid sign sin sinh
    sqrt square sub subtract tan tanh true_divide trunc where xlogy
""")
# On the CPU the last elements of a tensor take another path than those that fill a vector register, and
# these functions are then off by one bit from one place to another. The others are rounded correctly.
_ROUNDED = name_set("""
    acos asin atan atan2 cos cosh erf exp exp2 expm1 hypot log log10 log1p log2 logit pow rsqrt sigmoid
    sin sinh tan tanh xlogy elu gelu logsigmoid selu silu softplus
""")
_EXACT_ROWS = name_set("amax amin argmax argmin")
_OF_FUNCTIONAL = name_set("""
    elu gelu leaky_relu logsigmoid relu relu6 selu sigmoid silu softplus tanh
""")
_ROWS = name_set("amax amin argmax argmin logsumexp mean norm sum std var")
_SAME_ROWS = name_set("softmax log_softmax normalize")
LOSSES = name_set("""
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits soft_margin_loss
""")
_KEYWORDS = name_set("""
    min max nan posinf neginf other input exponent approximate beta delta weight pos_weight
    negative_slope target
""")
_LIKE_MASKS = name_set("mask valid keep kept pos neg fg bg active inside has_ is_")
_DTYPES = name_set("""
    float float16 float32 float64 bfloat16 double half long int int8 int16 int32 int64 uint8 bool
""")
_FUNCTIONAL = "torch.nn.functional."


class Selection(NamedTuple):
    """A selection `x[mask]`. `flat`: the result has one dimension whatever the shapes."""

    node: ast.expr
    tensor: ast.expr
    mask: ast.expr
    flat: bool = False


def syncs_of(chosen: Iterable[Selection]) -> tuple[ast.AST, ...]:
    """Return the nodes where selections synchronize: each one, and a call that looks up mask indices."""
    nodes = [one.node for one in chosen]
    indices = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    return (*nodes, *(index for index in indices if isinstance(index, ast.Call)))


class TreeInput(NamedTuple):
    """An input of a tree, and how many trailing dimensions are reduced between it and the result."""

    node: ast.expr
    lost: int


@dataclass
class Tree:
    """An elementwise expression of selections, `leaves`, that share one mask, and other inputs, `operands`.

    `rows` has the dimensions lost by each reduction of whole rows. `guarded`: it raises for elements out of
    range. `casts`: it converts types. `rounded`: an element's last bit may depend on its position.
    """

    mask: ast.expr
    leaves: list[tuple[Selection, int]] = field(default_factory=list)
    operands: list[TreeInput] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    guarded: bool = False
    casts: bool = False
    rounded: bool = False

    @property
    def syncs(self) -> tuple[ast.AST, ...]:
        """The nodes where the selections synchronize."""
        return syncs_of(leaf for leaf, _ in self.leaves)

    def parts(self) -> dict[str, ast.expr]:
        """Return what to observe: the mask `M`, the tensors `X`, `X1`, ..., the operands `C0`, ..."""
        parts = {tensor_part(n): leaf.tensor for n, (leaf, _) in enumerate(self.leaves)}
        parts |= {f"C{n}": operand.node for n, operand in enumerate(self.operands)}
        return parts | {"M": self.mask}


Assignments = Mapping[str, ast.Assign]


def tensor_part(number: int) -> str:
    """Return the name of the part that holds the tensor of a leaf."""
    return f"X{number}" if number else "X"


def selection(node: ast.AST, source: SourceFile) -> Selection | None:
    """Return the selection that an expression may be, or None. Its index may turn out not to be a mask."""
    for text in _FORMS:
        bound = match_form(text, node, source)
        if bound is not None and isinstance(node, ast.expr):
            return Selection(node, bound.parts["X"], bound.parts["M"], "masked_select" in text)
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return None
    index = mask_of_index(node.slice)
    return None if index is None else Selection(node, node.value, index)


def mask_of_index(index: ast.expr) -> ast.expr | None:
    """Return the part of an index that may be a mask: the whole index, or `mask` of `[mask, :]`."""
    if isinstance(index, ast.Tuple) and index.elts:
        if any(ast.unparse(one) not in (":", "...") for one in index.elts[1:]):
            return None
        index = index.elts[0]
    kinds = ast.Name | ast.Attribute | ast.Compare | ast.Call | ast.BinOp | ast.Subscript
    return index if isinstance(index, kinds) or inverted(index) is not None else None


def read_tree(
    node: ast.expr,
    source: SourceFile,
    named: Assignments | None = None,
    *,
    reduced: bool = False,
    mask: ast.expr | None = None,
) -> Tree | None:
    """Return the tree of an elementwise expression, or None if it is not one or has no selection.

    Without `mask`, the most likely of several masks is used. `reduced`: the expression is a reducing loss,
    and the tree describes the loss before its reduction.
    """
    named = named or {}
    for candidate in _masks(node, source, named) if mask is None else [mask]:
        tree = Tree(candidate)
        builder = _TreeBuilder(source, named, tree, node if reduced else None)
        if builder.read(node, 0) and tree.leaves:
            return tree
    return None


def _masks(node: ast.expr, source: SourceFile, named: Assignments) -> list[ast.expr]:
    """Return the masks in the expression and in the values of its names, the most likely first."""
    values = [node, *(assign.value for assign in named.values())]
    parts = [part for value in values for part in ast.walk(value)]
    masks = [chosen.mask for part in parts if (chosen := selection(part, source)) is not None]
    single: list[ast.expr] = []
    for mask in masks:
        if not any(equal(mask, other) for other in single):
            single.append(mask)

    def likeness(mask: ast.expr) -> int:
        text = source.segment(mask).lower()
        computed = not isinstance(mask, ast.Name | ast.Attribute)
        like = computed or any(word in text for word in _LIKE_MASKS)
        return 10 * like + sum(equal(mask, other) for other in masks)

    return sorted(single, key=likeness, reverse=True)


@dataclass
class _TreeBuilder:
    source: SourceFile
    named: Assignments
    tree: Tree
    reduced: ast.expr | None

    def read(self, node: ast.expr, lost: int) -> bool:
        """Add the node to the tree. Returns False if it does not fit."""
        if leaf := self._leaf(node):
            self.tree.leaves.append((leaf, lost))
            return True
        if isinstance(node, ast.Name) and node.id in self.named:
            return self.read(self.named[node.id].value, lost)
        named = not names_in(node).isdisjoint(self.named)
        if not named and not any(self._leaf(inner) for inner in ast.walk(node)):
            if not isinstance(node, ast.Constant):
                self.tree.operands.append(TreeInput(node, lost))
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            exact = constant_of(node.right) in (1, 2, 3)
            self.tree.rounded |= isinstance(node.op, ast.Pow) and not exact
            return self.read(node.left, lost) and self.read(node.right, lost)
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            return self.read(node.operand, lost)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return isinstance(node.ops[0], _COMPARISONS) and all(
                self.read(one, lost) for one in (node.left, *node.comparators)
            )
        if not isinstance(node, ast.Call):
            return False
        if (dotted := self.source.dotted(node.func)) is not None:
            return self._read_arguments(node, dotted, node.args, lost)
        if not isinstance(node.func, ast.Attribute):
            return False
        return self._read_arguments(node, node.func.attr, [node.func.value, *node.args], lost)

    def _leaf(self, node: ast.AST) -> Selection | None:
        leaf = selection(node, self.source)
        return leaf if leaf is not None and equal(leaf.mask, self.tree.mask) else None

    def _read_arguments(self, node: ast.Call, name: str, given: list[ast.expr], lost: int) -> bool:
        last = name.rpartition(".")[2]
        if name not in (last, f"torch.{last}", f"{_FUNCTIONAL}{last}"):
            return False
        if last in ("to", "type") and name == last:
            return self._read_cast(node, given, lost)
        if last in _ROWS | _SAME_ROWS:
            return self._read_rows(node, last, given, lost)
        functional = name.startswith(_FUNCTIONAL)
        self.tree.guarded |= last == "binary_cross_entropy"
        self.tree.casts |= last in _CASTS
        self.tree.rounded |= last in _ROUNDED or last in LOSSES
        if last in LOSSES and functional:
            reduction = constant_of(keywords_of(node).get("reduction"))
            whole = node is self.reduced or reduction == "none"
            return whole and self._read_all(given, node, lost)
        known = last in (_OF_FUNCTIONAL if functional else _ELEMENTWISE)
        return known and self._read_all(given, node, lost)

    def _read_all(self, given: list[ast.expr], node: ast.Call, lost: int) -> bool:
        words = [word for word in node.keywords if word.arg != "reduction"]
        if any(word.arg not in _KEYWORDS for word in words):
            return False
        operands = [*given, *(word.value for word in words)]
        starred = any(isinstance(one, ast.Starred) for one in given)
        return not starred and all(self.read(one, lost) for one in operands)

    def _read_cast(self, node: ast.Call, given: list[ast.expr], lost: int) -> bool:
        if node.keywords or len(given) != 2:
            return False
        module, _, name = (self.source.dotted(given[1]) or "").rpartition(".")
        self.tree.casts = True
        return module == "torch" and name in _DTYPES and self.read(given[0], lost)

    def _read_rows(self, node: ast.Call, last: str, given: list[ast.expr], lost: int) -> bool:
        """Add a reduction of the last dimension, counted from the end, which keeps rows apart."""
        words = keywords_of(node)
        keep = words.pop("keepdim", None)
        first, *rest = given
        dims = [value for word, value in words.items() if word in ("dim", "axis")]
        if not (last == "norm" and len(rest) == len(dims) == 1):
            dims += rest
        if words.keys() - {"dim", "axis", "p"} or len(dims) != 1 or ast.unparse(dims[0]) != "-1":
            return False
        if keep is not None and not isinstance(keep, ast.Constant):
            return False
        lost += last not in _SAME_ROWS and constant_of(keep) is not True
        self.tree.rows.append(lost)
        self.tree.rounded |= last not in _EXACT_ROWS
        return self.read(first, lost)


def trailing(values: Values, tree: Tree, number: int = 0) -> int:
    """Return how many dimensions of a leaf's result follow the dimensions that the mask covers."""
    tensor, lost = getattr(values, tensor_part(number)), tree.leaves[number][1]
    return len(tensor.shape) - len(values.M.shape) - lost


def need_fit(facts: Facts, tree: Tree, source: SourceFile) -> None:
    """Require that the expression over all elements contains the selected ones unchanged.

    Without a run, the source has to show that the mask has all dimensions of each tensor.
    """
    text = source.segment(tree.mask)
    for number, (leaf, _) in enumerate(tree.leaves):
        part = tensor_part(number)
        facts.need(
            f"`{text}` is a boolean mask on the same device, and each tensor's shape starts with its shape",
            lambda v, part=part, flat=leaf.flat: (
                is_mask(v.M, getattr(v, part))  # type: ignore[misc]
                and (not flat or (v.M.shape == getattr(v, part).shape and 1 not in v.M.shape))
            ),
            static=lambda _, leaf=leaf: covers(tree.mask, leaf.tensor, source),  # type: ignore[misc]
        )
    facts.need(
        "selections that are combined have the same number of dimensions",
        lambda v: _fits(v, tree),
    )
    facts.need(
        "the other operands have no dimension for the selected elements",
        lambda v: all(
            _is_apart(getattr(v, f"C{n}"), v, trailing(v, tree) + part.lost)
            for n, part in enumerate(tree.operands)
        ),
    )


def _fits(values: Values, tree: Tree) -> bool:
    behind = trailing(values, tree)
    ranks = {trailing(values, tree, number) for number in range(len(tree.leaves))}
    return behind >= 0 and ranks == {behind} and all(behind + lost > 0 for lost in tree.rows)


def _is_apart(seen: ObservedValue, values: Values, most: int) -> bool:
    if is_number(seen) or seen.kind in ("str", "NoneType"):
        return True
    if not is_tensor(seen):
        return False
    return len(seen.shape) <= most and (seen.device == values.X.device or not seen.shape)
