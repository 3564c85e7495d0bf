"""Methods of a tensor that only compute a value, and those that give a view of it."""

_VIEWS = """
    as_strided chunk detach diagonal expand expand_as flatten movedim moveaxis mT mH T H narrow
    permute real imag ravel reshape reshape_as select split split_with_sizes squeeze swapaxes
    swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view view_as
    view_as_complex view_as_real contiguous to type type_as float double half bfloat16 int long
    short bool byte cpu cuda
"""
_VALUES = """
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
"""

VIEWS = frozenset(_VIEWS.split())
"""These may share their storage with the tensor."""

VALUES = frozenset(_VALUES.split())
"""These give a new value."""

PURE = VIEWS | VALUES
