"""Selections by a mask, `x[mask]`, and elementwise expressions of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.source.facts import Facts, Values, is_mask, is_number, is_tensor
from torchtrim.source.forms import equal, match_form
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
_CASTS = frozenset(("float", "double", "half", "bfloat16", "long", "int", "bool"))
_ELEMENTWISE_WORDS = """
    abs absolute acos add asin atan atan2 ceil clamp clamp_max clamp_min clip clone cos cosh
    detach div divide eq erf exp exp2 expm1 floor ge greater gt hypot isfinite isinf isnan le less
    log log10 log1p log2 logical_and logical_not logical_or logical_xor logit lt maximum minimum
    mul multiply nan_to_num ne neg negative pow reciprocal relu round rsqrt sigmoid sign sin sinh
    sqrt square sub subtract tan tanh true_divide trunc where xlogy
"""
_ELEMENTWISE = _CASTS | frozenset(_ELEMENTWISE_WORDS.split())
_ROUNDED_WORDS = """
    acos asin atan atan2 cos cosh erf exp exp2 expm1 hypot log log10 log1p log2 logit pow rsqrt sigmoid
    sin sinh tan tanh xlogy elu gelu logsigmoid selu silu softplus
"""
# On the CPU the last elements of a tensor take another path than those that fill a vector register, and
# these functions are then off by one bit from one place to another. The others are rounded correctly.
_ROUNDED = frozenset(_ROUNDED_WORDS.split())
_EXACT_POWERS = (1, 2, 3)
_EXACT_ROWS = frozenset(("amax", "amin", "argmax", "argmin"))
_OF_FUNCTIONAL_WORDS = """
    elu gelu leaky_relu logsigmoid relu relu6 selu sigmoid silu softplus tanh
"""
_OF_FUNCTIONAL = frozenset(_OF_FUNCTIONAL_WORDS.split())
_ROWS_WORDS = """
    amax amin argmax argmin logsumexp mean norm sum std var
"""
_ROWS = frozenset(_ROWS_WORDS.split())
_SAME_ROWS = frozenset(("softmax", "log_softmax", "normalize"))
_LOSSES_WORDS = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits soft_margin_loss
"""
LOSSES = frozenset(_LOSSES_WORDS.split())
_KEYWORDS_WORDS = """
    min max nan posinf neginf other input exponent approximate beta delta weight
"""
_KEYWORDS = frozenset(_KEYWORDS_WORDS.split())
_KEYWORDS |= {"pos_weight", "negative_slope", "target"}
_LIKE_MASKS = (
    "mask",
    "valid",
    "keep",
    "kept",
    "pos",
    "neg",
    "fg",
    "bg",
    "active",
    "inside",
    "has_",
    "is_",
)
_DTYPES_WORDS = """
    float float16 float32 float64 bfloat16 double half long int int8 int16 int32 int64 uint8 bool
"""
_DTYPES = frozenset(_DTYPES_WORDS.split())
_FUNCTIONAL = "torch.nn.functional."


class Selection(NamedTuple):
    """A selection `x[mask]`. `flat`: the result has one dimension whatever the shapes."""

    node: ast.expr
    tensor: ast.expr
    mask: ast.expr
    flat: bool = False


def syncs_of(chosen: Iterable[Selection]) -> tuple[ast.AST, ...]:
    """Return the nodes where selections synchronize: each selection, and a call that looks up the mask's
    indices.
    """
    nodes = [one.node for one in chosen]
    places = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    return (*nodes, *(one for one in places if isinstance(one, ast.Call)))


class TreeInput(NamedTuple):
    """An input of a tree, and how many trailing dimensions are reduced between it and the result."""

    node: ast.expr
    lost: int


@dataclass
class Tree:
    """An elementwise expression of selections that share one mask.

    `leaves` are the selections, `operands` the other inputs. `rows` has, for each reduction of whole rows,
    the number of dimensions lost there; at least one must exist. `guarded`: the expression raises for
    elements out of range. `casts`: it converts types. `rounded`: an element's last bit may depend on its
    position.
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
        found = {tensor_part(n): leaf.tensor for n, (leaf, _) in enumerate(self.leaves)}
        found |= {f"C{n}": operand.node for n, operand in enumerate(self.operands)}
        return found | {"M": self.mask}


Assignments = Mapping[str, ast.Assign]


def tensor_part(number: int) -> str:
    """Return the name of the part that holds the tensor of a leaf."""
    return f"X{number}" if number else "X"


def selection(node: ast.AST, source: SourceFile) -> Selection | None:
    """Return the selection that an expression may be, or None. Its index may turn out not to be a mask."""
    for text in _FORMS:
        bound = match_form(text, node, source)
        if bound is not None:
            assert isinstance(node, ast.expr)
            return Selection(node, bound.parts["X"], bound.parts["M"], "masked_select" in text)
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return None
    index = mask_of_index(node.slice)
    return None if index is None else Selection(node, node.value, index)


def mask_of_index(index: ast.expr) -> ast.expr | None:
    """Return the part of an index that may be a mask: the whole index, or `mask` of `[mask, :]`."""
    if isinstance(index, ast.Tuple) and index.elts and all(map(_whole, index.elts[1:])):
        index = index.elts[0]
    kinds = ast.Name | ast.Attribute | ast.Compare | ast.Call | ast.BinOp | ast.Subscript
    inverse = isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Invert)
    return index if isinstance(index, kinds) or inverse else None


def _whole(index: ast.expr) -> bool:
    if isinstance(index, ast.Slice):
        return index.lower is None and index.upper is None and index.step is None
    return isinstance(index, ast.Constant) and index.value is ...


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
    for one in _masks(node, source, named or {}) if mask is None else [mask]:
        tree = Tree(one)
        if (
            _TreeBuilder(source, named or {}, tree, node if reduced else None).read(node, 0)
            and tree.leaves
        ):
            return tree
    return None


def _masks(node: ast.expr, source: SourceFile, named: Assignments) -> list[ast.expr]:
    values = [node, *(one.value for one in named.values())]
    parts = [part for value in values for part in ast.walk(value)]
    found = [chosen.mask for part in parts if (chosen := selection(part, source)) is not None]
    single: list[ast.expr] = []
    for mask in found:
        if not any(equal(mask, other) for other in single):
            single.append(mask)
    return sorted(single, key=lambda mask: -_likeness(mask, found, source))


def _likeness(mask: ast.expr, found: list[ast.expr], source: SourceFile) -> int:
    text = source.segment(mask).lower()
    named = not isinstance(mask, ast.Name | ast.Attribute) or any(
        one in text for one in _LIKE_MASKS
    )
    return 10 * named + sum(equal(mask, other) for other in found)


class _TreeBuilder:
    def __init__(
        self, source: SourceFile, named: Assignments, tree: Tree, reduced: ast.expr | None
    ) -> None:
        self._source = source
        self._reduced = reduced
        self._named = named
        self._tree = tree

    def read(self, node: ast.expr, lost: int) -> bool:
        """Add the node to the tree. Returns False if it does not fit."""
        found = self._leaf(node)
        if found is not None:
            self._tree.leaves.append((found, lost))
            return True
        if isinstance(node, ast.Name) and node.id in self._named:
            return self.read(self._named[node.id].value, lost)
        if not any(self._selects(inner) for inner in ast.walk(node)):
            if not isinstance(node, ast.Constant):
                self._tree.operands.append(TreeInput(node, lost))
            return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            self._tree.rounded |= isinstance(node.op, ast.Pow) and not _is_exact_power(node.right)
            return self.read(node.left, lost) and self.read(node.right, lost)
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            return self.read(node.operand, lost)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return isinstance(node.ops[0], _COMPARISONS) and all(
                self.read(one, lost) for one in (node.left, *node.comparators)
            )
        return isinstance(node, ast.Call) and self._read_call(node, lost)

    def _leaf(self, node: ast.AST) -> Selection | None:
        found = selection(node, self._source)
        return found if found is not None and equal(found.mask, self._tree.mask) else None

    def _selects(self, node: ast.AST) -> bool:
        named = isinstance(node, ast.Name) and node.id in self._named
        return named or self._leaf(node) is not None

    def _read_call(self, node: ast.Call, lost: int) -> bool:
        dotted = self._source.dotted(node.func)
        if dotted is not None:
            return self._read_arguments(node, dotted, node.args, lost)
        if not isinstance(node.func, ast.Attribute):
            return False
        return self._read_arguments(node, node.func.attr, [node.func.value, *node.args], lost)

    def _read_arguments(self, node: ast.Call, name: str, given: list[ast.expr], lost: int) -> bool:
        last = name.rpartition(".")[2]
        if name not in (last, f"torch.{last}", f"{_FUNCTIONAL}{last}"):
            return False
        if last in ("to", "type") and name == last:
            return self._read_cast(node, given, lost)
        if last in _ROWS | _SAME_ROWS:
            return self._read_rows(node, last, given, lost)
        functional = name.startswith(_FUNCTIONAL)
        self._tree.guarded |= last == "binary_cross_entropy"
        self._tree.casts |= last in _CASTS
        self._tree.rounded |= last in _ROUNDED or last in LOSSES
        if last in LOSSES and functional:
            whole = node is self._reduced or _keyword_text(node, "reduction") == "none"
            return whole and self._read_all(given, node, lost)
        known = last in (_OF_FUNCTIONAL if functional else _ELEMENTWISE)
        return known and self._read_all(given, node, lost)

    def _read_all(self, given: list[ast.expr], node: ast.Call, lost: int) -> bool:
        words = [word for word in node.keywords if word.arg != "reduction"]
        if any(word.arg not in _KEYWORDS for word in words):
            return False
        if any(isinstance(one, ast.Starred) for one in given):
            return False
        return all(self.read(one, lost) for one in [*given, *(word.value for word in words)])

    def _read_cast(self, node: ast.Call, given: list[ast.expr], lost: int) -> bool:
        if node.keywords or len(given) != 2:
            return False
        dotted = self._source.dotted(given[1]) or ""
        self._tree.casts = True
        is_type = dotted.startswith("torch.") and dotted.removeprefix("torch.") in _DTYPES
        return is_type and self.read(given[0], lost)

    def _read_rows(self, node: ast.Call, last: str, given: list[ast.expr], lost: int) -> bool:
        """Add a reduction of the last dimension, counted from the end, which keeps rows apart."""
        dims = [word.value for word in node.keywords if word.arg in ("dim", "axis")]
        words = {word.arg for word in node.keywords}
        rest, first = given[1:], given[0]
        if last == "norm" and len(rest) == 1 and len(dims) == 1:
            rest = []
        dims += rest
        if words - {"dim", "axis", "keepdim", "p"} or len(dims) != 1 or not _is_last(dims[0]):
            return False
        kept = [word.value for word in node.keywords if word.arg == "keepdim"]
        if kept and not isinstance(kept[0], ast.Constant):
            return False
        keeps = last in _SAME_ROWS or (bool(kept) and kept[0].value is True)  # type: ignore[attr-defined]
        self._tree.rows.append(lost + (not keeps))
        self._tree.rounded |= last not in _EXACT_ROWS
        return self.read(first, lost + (not keeps))


def _is_exact_power(exponent: ast.expr) -> bool:
    return isinstance(exponent, ast.Constant) and exponent.value in _EXACT_POWERS


def _is_last(dim: ast.expr) -> bool:
    return (
        isinstance(dim, ast.UnaryOp)
        and isinstance(dim.op, ast.USub)
        and isinstance(dim.operand, ast.Constant)
        and dim.operand.value == 1
    )


def _keyword_text(node: ast.Call, name: str) -> object:
    for word in node.keywords:
        if word.arg == name and isinstance(word.value, ast.Constant):
            return word.value.value
    return None


def trailing(values: Values, tree: Tree) -> int:
    """Return how many dimensions of the tree's result follow the dimensions that the mask covers."""
    (_, lost) = tree.leaves[0]
    return len(values.X.shape) - len(values.M.shape) - lost


def need_fit(facts: Facts, tree: Tree, source: SourceFile) -> None:
    """Require that the expression over all elements contains the selected ones unchanged.

    Without a run, the source has to say that the mask has all dimensions of each tensor. Raises `FixRefused`
    if it does not, or if an observed run contradicts it.
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
    ranks = {
        len(getattr(values, tensor_part(n)).shape) - len(values.M.shape) - lost
        for n, (_, lost) in enumerate(tree.leaves)
    }
    return behind >= 0 and ranks == {behind} and all(behind + lost > 0 for lost in tree.rows)


def _is_apart(seen: ObservedValue, values: Values, most: int) -> bool:
    if is_number(seen) or getattr(seen, "kind", "") in ("str", "NoneType"):
        return True
    if not is_tensor(seen):
        return False
    shape, device = seen.shape, seen.device
    return len(shape) <= most and (device == values.X.device or not shape)
