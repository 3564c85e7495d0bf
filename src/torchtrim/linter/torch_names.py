"""Functions and methods of torch by the kind of their result."""

from __future__ import annotations

from torchtrim.source.nodes import name_set
from torchtrim.source.operations import PURE

FACTORIES = name_set("""
    arange as_tensor empty eye from_numpy full hann_window hamming_window linspace logspace ones
    rand randint randn randperm tensor tril_indices triu_indices zeros BoolTensor ByteTensor
    DoubleTensor FloatTensor HalfTensor IntTensor LongTensor Tensor frombuffer normal
    blackman_window bartlett_window kaiser_window cartesian_prod polar complex scalar_tensor
""")
LIKE = name_set("""
    empty_like full_like ones_like rand_like randint_like randn_like zeros_like
""")
NEW = name_set("new_empty new_full new_ones new_zeros new_tensor new_empty_strided")
_FUNCTIONS = name_set("""
    addmm baddbmm cat cdist clamp concat concatenate conv1d conv2d conv3d cosine_similarity
    cross cumulative_trapezoid dstack einsum embedding hstack column_stack row_stack vstack
    stack tensordot trapz block_diag chain_matmul dropout layer_norm rms_norm relu relu_ isin
    result bitwise_left_shift bitwise_right_shift vander stft istft erfinv_ empty_strided
    segment_reduce real imag is_nonzero pairwise_distance pdist masked_fill normal batch_norm
    group_norm instance_norm native_layer_norm rot90 roll logaddexp logaddexp2 multinomial bernoulli
    poisson binomial atleast_1d atleast_2d atleast_3d broadcast_to adjoint positive float_power fill
    clamp_min clamp_max pinverse cholesky_inverse cholesky_solve lu_solve polygamma mvlgamma i0 prelu
    selu celu rrelu threshold hardshrink slice_scatter select_scatter diagonal_scatter
    as_strided_scatter constant_pad_nd combinations trapezoid nuclear_norm frobenius_norm
    adaptive_avg_pool1d adaptive_max_pool1d avg_pool1d max_pool1d max_pool2d max_pool3d bilinear
    conv_transpose1d conv_transpose2d conv_transpose3d convolution pixel_shuffle pixel_unshuffle
    channel_shuffle alpha_dropout feature_dropout feature_alpha_dropout resolve_conj resolve_neg
    arccosh arcsinh arctanh conj_physical ger put rsub msort
""")
FUNCTIONAL = name_set("""
    adaptive_avg_pool1d adaptive_avg_pool2d affine_grid avg_pool1d avg_pool2d binary_cross_entropy
    binary_cross_entropy_with_logits celu conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    cosine_embedding_loss cosine_similarity cross_entropy ctc_loss dropout dropout1d dropout2d elu
    embedding embedding_bag fold gelu glu grid_sample group_norm gumbel_softmax hardsigmoid
    hardswish hardtanh hinge_embedding_loss huber_loss instance_norm interpolate kl_div l1_loss
    layer_norm leaky_relu linear local_response_norm log_softmax logsigmoid margin_ranking_loss
    max_pool1d max_pool2d mish mse_loss multi_margin_loss nll_loss normalize one_hot pad
    pairwise_distance pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu relu6 rms_norm
    scaled_dot_product_attention selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin
    softplus softsign tanh threshold triplet_margin_loss unfold upsample adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d alpha_dropout avg_pool3d batch_norm
    bilinear celu_ channel_shuffle conv_transpose3d conv_tbc dropout3d elu_ feature_alpha_dropout
    gaussian_nll_loss grouped_mm hardshrink hardtanh_ leaky_relu_ lp_pool1d lp_pool2d lp_pool3d
    max_pool3d max_unpool1d max_unpool2d max_unpool3d multilabel_margin_loss
    multilabel_soft_margin_loss pdist relu_ rrelu rrelu_ scaled_mm selu_ softshrink tanhshrink
    threshold_ triplet_margin_with_distance_loss upsample_bilinear upsample_nearest
""")
BOOL = name_set("""
    bool eq ne lt le gt ge equal_ greater greater_equal less less_equal not_equal isclose isfinite
    isinf isnan isneginf isposinf isreal isin logical_and logical_not logical_or logical_xor
    signbit any all BoolTensor
""")
INT = name_set("""
    argmax argmin argsort bincount bucketize count_nonzero int long searchsorted randperm short
    LongTensor IntTensor nonzero argwhere tril_indices triu_indices randint nonzero_static one_hot
    multinomial
""")
SEVERAL = name_set("""
    aminmax broadcast_tensors chunk cummax cummin dsplit eig eigh frexp hsplit kthvalue lstsq lu
    meshgrid mode qr slogdet sort split split_with_sizes std_mean svd tensor_split topk unbind
    unique_consecutive unsafe_chunk unsafe_split var_mean vsplit unravel_index
""")
REDUCTIONS = name_set("""
    all any sum mean max min prod argmax argmin median norm std var count_nonzero nansum nanmean
    logsumexp amax amin dist trace dot vdot nanmedian
""")
LOSSES = name_set("""
    binary_cross_entropy binary_cross_entropy_with_logits cross_entropy ctc_loss huber_loss kl_div
    l1_loss mse_loss nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss cosine_embedding_loss
    margin_ranking_loss poisson_nll_loss hinge_embedding_loss multi_margin_loss gaussian_nll_loss
    multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss
""")
PLAIN_METHODS = name_set("""
    dim ndimension numel size element_size stride storage_offset data_ptr is_contiguous is_complex
    is_floating_point is_pinned is_shared get_device nelement is_same_size is_inference is_signed
    storage_type has_names
""")
ONLY_TENSORS = name_set("""
    abs_ add_ addcdiv_ addcmul_ addmm amax amin bernoulli_ bmm chunk clamp clamp_ clamp_min contiguous
    copy_ detach div_ exp_ expand expand_as fill_ gather index_add_ index_copy_ index_fill_ index_put_
    index_select is_contiguous is_floating_point log_softmax logsumexp masked_fill masked_fill_
    masked_scatter masked_scatter_ masked_select movedim mul_ narrow new_empty new_full new_ones
    new_tensor new_zeros normal_ numel nelement permute repeat_interleave requires_grad_ scatter
    scatter_ scatter_add scatter_add_ softmax sub_ unbind unsqueeze unsqueeze_ uniform_ view_as
    type_as zero_ matmul index_add triu tril argsort_ bfloat16_ sigmoid tanh relu cumsum_ nonzero_static
    isnan isinf isfinite isneginf isposinf logical_and logical_or logical_not logical_xor bitwise_and
    bitwise_or bitwise_not bitwise_xor nan_to_num nansum nanmean count_nonzero rsqrt scatter_reduce
    take_along_dim index_fill index_copy long mm mv baddbmm addcmul addcdiv
""")
_METHODS = name_set("""
    adjoint bernoulli bitwise_left_shift bitwise_right_shift broadcast_to clamp_max cholesky_inverse
    cholesky_solve lu_solve multinomial positive float_power select_scatter slice_scatter polygamma
    pinverse to_dense coalesce resolve_conj stft istft
""")
LAYERS = name_set("""
    Linear Embedding LayerNorm RMSNorm Dropout Dropout1d Dropout2d Identity GELU ReLU ReLU6 SiLU Sigmoid
    Tanh Softmax LogSoftmax Softplus LeakyReLU ELU PReLU Hardswish Hardsigmoid Mish Conv1d Conv2d Conv3d
    ConvTranspose1d ConvTranspose2d ConvTranspose3d BatchNorm1d BatchNorm2d BatchNorm3d GroupNorm
    InstanceNorm1d InstanceNorm2d AvgPool1d AvgPool2d MaxPool1d MaxPool2d AdaptiveAvgPool1d
    AdaptiveAvgPool2d AdaptiveMaxPool1d AdaptiveMaxPool2d Upsample PixelShuffle PixelUnshuffle Flatten
    Unfold Fold Bilinear ReflectionPad2d ReplicationPad2d ZeroPad2d ConstantPad1d EmbeddingBag
    CrossEntropyLoss MSELoss L1Loss BCELoss BCEWithLogitsLoss NLLLoss KLDivLoss SmoothL1Loss HuberLoss
    CTCLoss CosineSimilarity
""")
COLLECTIVES = name_set("""
    all_reduce all_reduce_coalesced all_gather_into_tensor reduce_scatter_tensor all_to_all_single
    _all_gather_base _reduce_scatter_base
""")

DEVICE_TENSORS = name_set("""
    FloatTensor HalfTensor BFloat16Tensor DoubleTensor IntTensor LongTensor ByteTensor BoolTensor
""")
"""Methods, such as those of DeepSpeed's accelerators, that copy data to the device."""
FUNCTIONS = FACTORIES | LIKE | _FUNCTIONS | PURE | SEVERAL
METHODS = PURE | SEVERAL | ONLY_TENSORS | NEW | _METHODS
HOST_ATTRIBUTES = name_set("""
    shape ndim is_cuda is_cpu is_mps is_meta requires_grad is_leaf is_sparse is_quantized layout
    names itemsize nbytes is_nested grad_fn
""")
TENSOR_ATTRIBUTES = name_set("T mT H mH real imag data grad")
DTYPES = name_set("""
    float float16 float32 float64 bfloat16 half double int int8 int16 int32 int64 long short uint8
    bool complex64 complex128 cfloat cdouble float8_e4m3fn float8_e5m2 uint16 uint32 uint64
""")
