"""Which expressions give a value whatever the numbers in their tensors are: they may run where they did not.

Nothing there draws random numbers, synchronizes with the device, writes in place, or raises for a value.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from torchtrim.source.source import Source
from torchtrim.source.tensor_methods import VALUES, VIEWS

_RAISING_NAMES = """
    allclose argwhere bincount bucketize cholesky cpu cuda data_ptr det dequantize equal
    floor_divide fmod frexp gather gcd get_device histc index_add index_copy index_fill
    index_put index_reduce index_select inner inverse is_nonzero item kthvalue lcm logdet
    masked_scatter masked_select matrix_power mode nanquantile nonzero nonzero_static numpy pow
    quantile remainder repeat_interleave scatter scatter_add scatter_reduce searchsorted slogdet
    storage_offset svd take take_along_dim to tolist unique unique_consecutive vdot
"""
_RAISING = frozenset(_RAISING_NAMES.split())
_FUNCTIONS_NAMES = """
    zeros_like ones_like full_like zeros ones full einsum stack cat concat where relu gelu silu
    elu leaky_relu softplus logsigmoid softmax log_softmax normalize layer_norm linear mse_loss
    l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits cosine_similarity
    scaled_dot_product_attention square
"""
_FUNCTIONS = frozenset(_FUNCTIONS_NAMES.split())
_LABELLED = frozenset(("cross_entropy", "nll_loss"))
_TOTAL = (VALUES | VIEWS | _FUNCTIONS | _LABELLED) - _RAISING
_MAY_BE_THE_SAME = VIEWS | {"conj", "sum_to_size", "positive"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult, ast.BitAnd, ast.BitOr, ast.BitXor)
_INERT = (ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.List, ast.keyword, ast.Slice)
_NODES = (*_INERT, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.UnaryOp)


def is_total(
    node: ast.AST, source: Source, is_guard: Callable[[ast.expr], bool] | None = None
) -> bool:
    """Whether it is made of such operators and functions alone.

    `is_guard`: of `a if test else b` only the first counts where the test is one.
    """
    if is_guard is not None and isinstance(node, ast.IfExp) and is_guard(node.test):
        return is_total(node.body, source, is_guard)
    parts = ast.iter_child_nodes(node)
    return _total_itself(node, source) and all(is_total(one, source, is_guard) for one in parts)


def labels_of(node: ast.AST, source: Source) -> list[ast.expr]:
    """The names of class numbers in it, for which a loss raises where they are out of range.

    An expression of a name is given as it is, but for a view or `torch.where(mask, labels, ignored)`.
    """
    found = []
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and _last(part, source) in _LABELLED:
            words = {word.arg: word.value for word in part.keywords}
            label = part.args[1] if len(part.args) > 1 else words.get("target", part)
            found.append(_labels(label, words.get("ignore_index"), source))
    return found


def _labels(node: ast.expr, ignored: ast.expr | None, source: Source) -> ast.expr:
    if (
        isinstance(node, ast.Call)
        and source.dotted(node.func) == "torch.where"
        and len(node.args) == 3
    ):
        other = ast.unparse(ignored) if ignored is not None else "-100"
        if ast.unparse(node.args[2]) == other:
            return _labels(node.args[1], ignored, source)
    if (
        isinstance(node, ast.Call)
        and source.dotted(node.func) is None
        and _last(node, source) in VIEWS
    ):
        assert isinstance(node.func, ast.Attribute)
        return _labels(node.func.value, ignored, source)
    return node


def is_fresh(node: ast.AST, source: Source) -> bool:
    """Whether its value is a new tensor, which no other name or view shares."""
    if isinstance(node, ast.BinOp | ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.Invert)
    if not isinstance(node, ast.Call):
        return False
    last = _last(node, source)
    if last in _MAY_BE_THE_SAME or any(word.arg in ("out", "inplace") for word in node.keywords):
        return False
    return last in VALUES | _FUNCTIONS | _LABELLED


def _last(call: ast.Call, source: Source) -> str:
    """The name of the function of torch or the method that is called."""
    dotted = source.dotted(call.func)
    if dotted is not None:
        return dotted.rpartition(".")[2] if dotted.startswith("torch.") else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    receiver = call.func.value
    itself = isinstance(receiver, ast.Name) and receiver.id in ("self", "cls", "super")
    return "" if itself else call.func.attr


def _total_itself(node: ast.AST, source: Source) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, _OPERATORS) or _is_square(node)
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and not isinstance(
            node.ops[0], ast.In | ast.NotIn | ast.Is | ast.IsNot
        )
    if isinstance(node, ast.Subscript):
        return all(isinstance(part, _FIXED) for part in ast.walk(node.slice))
    if isinstance(node, ast.Call):
        words = {word.arg for word in node.keywords}
        return _last(node, source) in _TOTAL and not words & {
            "out",
            "rounding_mode",
            "inplace",
            None,
        }
    return isinstance(node, _NODES) and not isinstance(getattr(node, "op", None), ast.Not)


def _is_square(node: ast.BinOp) -> bool:
    power = node.right.value if isinstance(node.right, ast.Constant) else None
    return isinstance(node.op, ast.Pow) and isinstance(power, int) and power >= 0


_FIXED = (ast.Constant, ast.Tuple, ast.Slice, ast.UnaryOp, ast.unaryop, ast.expr_context)
