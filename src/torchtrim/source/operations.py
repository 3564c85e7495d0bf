"""Tensor operations by name: pure ones, ones that raise for no value, views and new tensors."""

from __future__ import annotations

import ast

from torchtrim.source.nodes import compares_values, constant_of, find_all, keywords_of, name_set
from torchtrim.source.source import SourceFile

SYNCHRONIZING = name_set("synchronize device_synchronize cuda_synchronize torch_synchronize")
"""`torch.cuda.synchronize`, and helpers of projects around it, by the names that they have there."""

VIEWS = name_set("""
    as_strided chunk detach diagonal expand expand_as flatten movedim moveaxis mT mH T H narrow
    permute real imag ravel reshape reshape_as select split split_with_sizes squeeze swapaxes
    swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view view_as
    view_as_complex view_as_real contiguous to type type_as float double half bfloat16 int long
    short bool byte cpu cuda
""")
"""Methods whose result may share the tensor's storage."""

VALUES = name_set("""
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr all allclose amax amin
    aminmax angle any arccos arcsin arctan arctan2 argmax argmin argsort argwhere asin asinh
    atan atan2 atanh baddbmm bincount bitwise_and bitwise_not bitwise_or bitwise_xor bmm
    bucketize ceil cholesky clamp clip clone conj copysign corrcoef cos cosh count_nonzero cov
    cross cummax cummin cumprod cumsum deg2rad det diag diag_embed diagflat diff digamma dim
    dist div divide dot dsplit element_size eq equal erf erfc erfinv exp exp2 expm1 fix flip
    fliplr flipud floor floor_divide fmax fmin fmod frac frexp gather gcd ge greater
    greater_equal gt heaviside histc hypot igamma index_add index_copy index_fill index_put
    index_reduce index_select inner inverse is_complex is_contiguous is_floating_point
    is_nonzero isclose isfinite isinf isnan isneginf isposinf isreal item kron kthvalue lcm
    ldexp le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp logcumsumexp
    logdet logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill
    masked_scatter masked_select matmul matrix_exp matrix_power max maximum mean median min
    minimum mm mode mul multiply mv nan_to_num nanmean nanmedian nanquantile nansum narrow_copy
    ndimension ne neg negative new_empty new_full new_ones new_tensor new_zeros nextafter
    nonzero nonzero_static norm not_equal numel numpy outer pow prod quantile rad2deg reciprocal
    relu remainder renorm repeat repeat_interleave rot90 round roll rsqrt scatter scatter_add
    scatter_reduce searchsorted sgn sigmoid sign signbit sin sinc sinh size slogdet softmax sort
    sqrt square std stride sub subtract sum svd take take_along_dim tan tanh tile tolist topk
    trace tril triu true_divide trunc unique unique_consecutive var vdot where xlogy sum_to_size
    data_ptr get_device storage_offset dequantize
""")
"""Methods that return a new value."""

PURE = VIEWS | VALUES


_PURE_BUILTINS = name_set("""
    abs all any bool dict enumerate float int isinstance len list max min range reversed round set
    sorted str sum tuple zip
""")
_RANDOM = name_set("""
    rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson
    dropout rrelu gumbel_softmax
""")
_SIMPLE = (ast.Name, ast.Attribute, ast.Constant, ast.UnaryOp, ast.unaryop, ast.expr_context)


def is_simple(node: ast.AST) -> bool:
    """Return True if the expression is cheap enough to write twice: a name, an attribute or a number."""
    return all(isinstance(part, _SIMPLE) for part in ast.walk(node))


def is_pure(node: ast.AST, source: SourceFile) -> bool:
    """Return True if the expression only computes: no user function, random draw or in-place change."""
    effects = ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.Lambda
    return not any(
        isinstance(part, effects) or (isinstance(part, ast.Call) and not _pure_call(part, source))
        for part in ast.walk(node)
    )


def _pure_call(node: ast.Call, source: SourceFile) -> bool:
    if (name := source.dotted(node.func)) is not None:
        last = name.rpartition(".")[2]
        return (
            name.startswith(("torch.", "math."))
            and not last.endswith("_")
            and last not in _RANDOM
            and not last[:1].isupper()
            and not name.startswith(("torch.cuda.", "torch.distributed.", "torch.random."))
        )
    if isinstance(node.func, ast.Name):
        return node.func.id in _PURE_BUILTINS
    if isinstance(node.func, ast.Attribute):
        itself = isinstance(node.func.value, ast.Name) and node.func.value.id in ("self", "cls")
        return not itself and node.func.attr in PURE
    return False


_RAISING = name_set("""
    allclose argwhere bincount bucketize cholesky cpu cuda data_ptr det dequantize equal
    floor_divide fmod frexp gather gcd get_device histc index_add index_copy index_fill
    index_put index_reduce index_select inner inverse is_nonzero item kthvalue lcm logdet
    masked_scatter masked_select matrix_power mode nanquantile nonzero nonzero_static numpy pow
    quantile remainder repeat_interleave scatter scatter_add scatter_reduce searchsorted slogdet
    storage_offset svd take take_along_dim to tolist unique unique_consecutive vdot
""")
_FUNCTIONS = name_set("""
    zeros_like ones_like full_like zeros ones full einsum stack cat concat where relu gelu silu
    elu leaky_relu softplus logsigmoid softmax log_softmax normalize layer_norm linear mse_loss
    l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy_with_logits cosine_similarity
    scaled_dot_product_attention square
""")
_LABELLED = frozenset(("cross_entropy", "nll_loss"))
_TOTAL = (VALUES | VIEWS | _FUNCTIONS | _LABELLED) - _RAISING
_MAY_BE_THE_SAME = VIEWS | {"conj", "sum_to_size", "positive"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult, ast.BitAnd, ast.BitOr, ast.BitXor)
_INERT = (ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.List, ast.keyword, ast.Slice)
_NODES = (*_INERT, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.UnaryOp)


def is_total(node: ast.AST, source: SourceFile) -> bool:
    """Return True if the expression may run anywhere: no random draw, sync, in-place write or error."""
    parts = ast.iter_child_nodes(node)
    return _total_itself(node, source) and all(is_total(one, source) for one in parts)


def labels_of(node: ast.AST, source: SourceFile) -> list[ast.expr]:
    """Return the class labels that losses use, without views and masks: labels out of range raise."""
    found = []
    for call in find_all(node, ast.Call):
        if _last(call, source) in _LABELLED:
            words = keywords_of(call)
            label = call.args[1] if len(call.args) > 1 else words.get("target", call)
            found.append(_labels(label, words.get("ignore_index"), source))
    return found


def _labels(node: ast.expr, ignored: ast.expr | None, source: SourceFile) -> ast.expr:
    if not isinstance(node, ast.Call):
        return node
    dotted = source.dotted(node.func)
    if dotted == "torch.where" and len(node.args) == 3:
        other = ast.unparse(ignored) if ignored is not None else "-100"
        if ast.unparse(node.args[2]) == other:
            return _labels(node.args[1], ignored, source)
    if dotted is None and isinstance(node.func, ast.Attribute) and _last(node, source) in VIEWS:
        return _labels(node.func.value, ignored, source)
    return node


def is_fresh(node: ast.AST, source: SourceFile) -> bool:
    """Return True if the expression creates a tensor that no other name or view shares."""
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


def operands_of(call: ast.Call, source: SourceFile) -> tuple[str, list[ast.expr]]:
    """Return the name of a called method or torch function, and its operands, the receiver first."""
    dotted = source.dotted(call.func)
    if dotted is None and isinstance(call.func, ast.Attribute):
        return call.func.attr, [call.func.value, *call.args]
    module, _, name = (dotted or "").rpartition(".")
    return name, list(call.args) if module == "torch" else []


def _last(call: ast.Call, source: SourceFile) -> str:
    if (dotted := source.dotted(call.func)) is not None:
        return dotted.rpartition(".")[2] if dotted.startswith("torch.") else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    receiver = call.func.value
    itself = isinstance(receiver, ast.Name) and receiver.id in ("self", "cls", "super")
    return "" if itself else call.func.attr


def _total_itself(node: ast.AST, source: SourceFile) -> bool:
    if isinstance(node, ast.BinOp):
        power = constant_of(node.right) if isinstance(node.op, ast.Pow) else None
        return isinstance(node.op, _OPERATORS) or (isinstance(power, int) and power >= 0)
    if isinstance(node, ast.Compare):
        return compares_values(node)
    if isinstance(node, ast.Subscript):
        return all(isinstance(part, _FIXED) for part in ast.walk(node.slice))
    if isinstance(node, ast.Call):
        unsafe = {"out", "rounding_mode", "inplace", None} & keywords_of(node).keys()
        return _last(node, source) in _TOTAL and not unsafe
    return isinstance(node, _NODES) and not isinstance(getattr(node, "op", None), ast.Not)


_FIXED = (ast.Constant, ast.Tuple, ast.Slice, ast.UnaryOp, ast.unaryop, ast.expr_context)
