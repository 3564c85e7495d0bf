"""Rows about shapes that depend on data: the host waits for the size to allocate."""

from __future__ import annotations

from typing import Any

from torchtrim.syncs.base import (
    TT102,
    Ask,
    device,
    filled,
    is_mask,
    is_tensor,
    native,
    on_device,
    on_host,
)

INDEX = ("aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor")
INDEX_PUT = (
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index_put",
)
_GROUPED_TYPE = "torch.bfloat16"
_DENSE = "torch.strided"


def _masks(ask: Ask) -> int:
    found = [index for index in ask.args["indices"] if is_tensor(index) and is_mask(index)]
    return sum(on_device(ask, mask) for mask in found)


def is_masked_fill(ask: Ask) -> bool:
    """Return True if an indexed assignment equals `masked_fill_`: one mask, and one number on the host."""
    value: Any = ask.args["values"]
    if ask.args.get("accumulate") or not on_host(ask, value) or value.numel() != 1:
        return False
    indices = [index for index in ask.args["indices"] if is_tensor(index)]
    here = on_device(ask, ask.args["self"])
    return len(indices) == 1 and is_mask(indices[0]) and ask.is_on_device(indices[0]) == here


def _assigned_masks(ask: Ask) -> int:
    return 0 if is_masked_fill(ask) else _masks(ask)


def _repeats(ask: Ask) -> int:
    repeats = ask.args["repeats"]
    known = ask.args.get("output_size") is not None
    return 2 if on_device(ask, repeats) and not known and repeats.numel() else 0


def _bins(ask: Ask) -> int:
    values = ask.args["self"]
    if not on_device(ask, values) or not values.numel():
        return 0
    return 1 if str(values.dtype) == "torch.uint8" else 2


def _is_scattered(ask: Ask, value: Any) -> bool:
    """Return True for a sparse tensor on the device that may have duplicate indices."""
    loose = getattr(value, "is_sparse", False) and not value.is_coalesced()
    return bool(loose and on_device(ask, value))


def _merged_factors(ask: Ask) -> int:
    factors = (ask.args.get(name) for name in ("self", "mat1", "mat2", "other"))
    return sum(_is_scattered(ask, factor) for factor in factors)


def _merged_batch(ask: Ask) -> int:
    batch = ask.args["self"]
    if not getattr(batch, "is_sparse", False) or not on_device(ask, batch):
        return 0
    return 1 + _is_scattered(ask, batch)


def _made_sparse(ask: Ask) -> int:
    values = ask.args["self"]
    if str(getattr(values, "layout", _DENSE)) == _DENSE:
        return int(on_device(ask, values))
    return int(_is_scattered(ask, values))


def _merged_sums(ask: Ask) -> int:
    values = ask.args["self"]
    places = values.sparse_dim()
    summed = {dim % values.dim() for dim in ask.args["dim"]}
    kept = any(dim not in summed for dim in range(places))
    return int(kept and on_device(ask, values))


def _membership(ask: Ask) -> int:
    elements, tested = ask.args.get("elements"), ask.args["test_elements"]
    if not on_device(ask, tested):
        return 0
    number = elements.numel() if elements is not None else 1
    if not number or tested.numel() < int(10 * number**0.145):
        return 0
    return 1 if ask.args.get("assume_unique") else 3


def _groups(ask: Ask) -> int:
    types = {str(ask.args[name].dtype) for name in ("self", "mat2")}
    wanted = str(ask.args.get("out_dtype") or _GROUPED_TYPE)
    slow = {*types, wanted} != {_GROUPED_TYPE}
    return int(slow and on_device(ask, ask.args.get("offs")))


def _jagged(ask: Ask) -> int:
    return int(ask.args.get("total_L") is None and on_device(ask, ask.args["dense"]))


ROWS = (
    TT102(
        name="nonzero",
        what="`nonzero`, `argwhere` and `torch.where(condition)`",
        when="the tensor is on the device",
        operators=("aten::nonzero",),
        waits=device("self"),
        evidence=(native("cuda/Nonzero.cu", 214, "copies the number of elements that are not 0"),),
        advice="A weight of 0 for the rest, `torch.where(condition, a, b)`, or "
        "`nonzero_static(size=n)` if the number is known.",
    ),
    TT102(
        name="mask-index",
        what="`x[mask]`, also with a list of bools as the mask",
        when="once for each bool or uint8 index on the device; a mask on the host is free",
        operators=INDEX,
        waits=_masks,
        evidence=(
            native("IndexingUtils.h", 55, "a mask becomes positions by `nonzero`"),
            native("cuda/Nonzero.cu", 214, "which synchronizes to read their number"),
        ),
        advice="`torch.where(mask, x, 0)` and sums divided by `mask.sum()`.",
    ),
    TT102(
        name="mask-assign",
        what="`x[mask] = value`, and the backward of `x[mask]`, which adds into zeros",
        when="once for each mask on the device, unless it is a single mask, the value is a number "
        "or one element on the host, and it does not accumulate",
        operators=INDEX_PUT,
        waits=_assigned_masks,
        evidence=(
            native("IndexingUtils.h", 55, "a mask becomes positions by `nonzero`"),
            native(
                "TensorAdvancedIndexingUtils.h", 30, "one number on the host takes another path"
            ),
            native("TensorAdvancedIndexing.cpp", 975, "the path of `masked_fill_`, which is free"),
        ),
        advice="`torch.where(mask, value, x)`; for packed values `masked_scatter`.",
    ),
    TT102(
        name="masked-select",
        what="`masked_select`; printing a tensor of floats calls it",
        when="the tensor is on the device",
        operators=("aten::masked_select",),
        waits=device("self", "mask"),
        evidence=(native("cuda/IndexKernel.cpp", 43, "indexes by the mask, which synchronizes"),),
        advice="`torch.where(mask, x, 0)` and sums divided by `mask.sum()`.",
    ),
    TT102(
        name="masked-scatter-backward",
        what="The backward of `masked_scatter`",
        when="the gradient is on the device and the source needs one",
        operators=("aten::masked_scatter_backward",),
        waits=device("grad_output", "mask"),
        evidence=(native("TensorAdvancedIndexing.cpp", 2419, "selects the gradient by the mask"),),
        advice="Gather by `mask.cumsum(0) - 1`, then `torch.where`.",
    ),
    TT102(
        name="unique",
        what="`unique` and `unique_consecutive` of all elements",
        when="the tensor is on the device and not empty",
        operators=("aten::_unique2", "aten::_unique", "aten::unique_consecutive"),
        waits=filled("self"),
        evidence=(
            native("cuda/UniqueCub.cu", 121, "reads their number"),
            native("cuda/UniqueCub.cu", 130, "the same with counts"),
            native("cuda/UniqueCub.cu", 293, "the same for bools"),
        ),
        advice="If the values are known, `torch.arange`; else sort, and mask repeated neighbours.",
    ),
    TT102(
        name="unique-dim",
        what="`unique` and `unique_consecutive` along a dimension",
        when="the tensor is on the device and not empty, at least once",
        operators=("aten::unique_dim", "aten::unique_dim_consecutive"),
        waits=filled("self"),
        evidence=(native("cuda/Unique.cu", 73, "the end that thrust returns is a host pointer"),),
        advice="Encode each row as one number, and see `unique`.",
    ),
    TT102(
        name="repeat-interleave",
        what="`repeat_interleave` by a tensor",
        when="`repeats` is on the device and `output_size` is not given: twice",
        operators=("aten::repeat_interleave.Tensor", "aten::repeat_interleave.Tensor_out"),
        waits=_repeats,
        evidence=(
            native("Repeat.h", 35, "reads the sum of the repeats"),
            native("Repeat.h", 37, "reads whether all are >= 0"),
        ),
        advice="`output_size=`.",
    ),
    TT102(
        name="bincount",
        what="`bincount`, with `minlength` too",
        when="the tensor is on the device and not empty: twice, for uint8 once",
        operators=("aten::bincount",),
        waits=_bins,
        evidence=(
            native("cuda/SummaryOps.cu", 267, "copies the smallest value"),
            native("cuda/SummaryOps.cu", 277, "reads the largest value"),
        ),
        advice="`torch.zeros(n, device=...).scatter_add_(0, x, torch.ones_like(x))`.",
    ),
    TT102(
        name="isin",
        what="`torch.isin` with many test elements",
        when="there are at least `10 * elements ** 0.145` of them: three times, once with `assume_unique`",
        operators=(
            "aten::isin.Tensor_Tensor",
            "aten::isin.Tensor_Tensor_out",
            "aten::isin.Scalar_Tensor",
            "aten::isin.Scalar_Tensor_out",
        ),
        waits=_membership,
        evidence=(
            native("TensorCompare.cpp", 544, "the unique elements"),
            native("TensorCompare.cpp", 546, "the unique test elements"),
            native("TensorCompare.cpp", 566, "a number is copied into the last element of a mask"),
            native("TensorCompare.cpp", 1008, "the least number of test elements"),
        ),
        advice="A table of bools indexed by the values, or `searchsorted` in sorted test elements.",
    ),
    TT102(
        name="grouped-matmul",
        what="`torch.nn.functional.grouped_mm` with offsets",
        when="the offsets are on the device and not everything is bfloat16; before Hopper also with "
        "bfloat16, which the arguments do not show",
        operators=("aten::_grouped_mm",),
        waits=_groups,
        evidence=(
            native("GroupedMMUtils.h", 134, "copies the offsets to slice by them"),
            native("cuda/GroupedBlas.cpp", 704, "the fast path is for bfloat16 on new devices"),
        ),
        advice="bfloat16 on Hopper or later; else a product for all groups at once.",
    ),
    TT102(
        name="dense-to-jagged",
        what="A padded tensor becomes a jagged one",
        when="the total length is not given",
        operators=("aten::_padded_dense_to_jagged_forward",),
        waits=_jagged,
        evidence=(
            native(
                "nested/cuda/NestedTensorTransformerFunctions.cu", 1501, "reads the last offset"
            ),
        ),
        advice="Give the total length.",
    ),
    TT102(
        name="coalesce",
        what="`coalesce` of a sparse tensor",
        when="it is on the device, at least once",
        operators=("aten::_coalesce",),
        waits=device("self"),
        evidence=(
            native(
                "sparse/cuda/SparseCUDATensor.cu", 95, "the number of indices is used on the host"
            ),
        ),
        advice="`is_coalesced=True` on creation, if that holds.",
    ),
    TT102(
        name="sparse-product",
        what="A product with a sparse tensor that is not coalesced, such as a new `torch.sparse_coo_tensor`",
        when="at least once, each time, for each such tensor on the device",
        operators=(
            "aten::mm",
            "aten::addmm",
            "aten::hspmm",
            "aten::_sparse_addmm",
            "aten::_sparse_sparse_matmul",
        ),
        waits=_merged_factors,
        evidence=(
            native("sparse/cuda/SparseCUDATensorMath.cu", 116, "coalesces the sparse factor"),
            native("sparse/cuda/SparseCUDATensor.cu", 91, "which counts the indices on the host"),
        ),
        advice="`adjacency = adjacency.coalesce()` once, ahead of the loop.",
    ),
    TT102(
        name="sparse-batch-product",
        what="`torch.bmm` of a batch of sparse matrices",
        when="they are on the device, for all its streams; at least once more if not coalesced",
        operators=("aten::bmm",),
        waits=_merged_batch,
        evidence=(
            native(
                "sparse/cuda/SparseCUDATensorMath.cu",
                785,
                "synchronizes to find the end of each matrix",
            ),
            native("sparse/cuda/SparseCUDATensorMath.cu", 773, "coalesces the batch"),
        ),
        advice="One sparse matrix with the batch along its diagonal, coalesced ahead of the loop.",
    ),
    TT102(
        name="sparse-sum",
        what="`torch.sparse.sum` along some of the sparse dimensions",
        when="it is on the device, at least once, even if it is coalesced",
        operators=("aten::_sparse_sum.dim",),
        waits=_merged_sums,
        evidence=(native("sparse/SparseTensorMath.cpp", 1709, "coalesces the rest"),),
        advice="A product with a vector of ones, or `index_add_` of the values.",
    ),
    TT102(
        name="to-sparse",
        what="A dense tensor becomes a sparse one",
        when="it is on the device; one that is sparse and coalesced changes its layout without a sync",
        operators=(
            "aten::_to_sparse",
            "aten::_to_sparse_csr",
            "aten::_to_sparse_csc",
            "aten::_to_sparse_bsr",
            "aten::_to_sparse_bsc",
        ),
        waits=_made_sparse,
        evidence=(
            native("TensorConversions.cpp", 1491, "the indices of nonzero elements, by `nonzero`"),
            native("TensorConversions.cpp", 1030, "the same for compressed layouts"),
            native("TensorConversions.cpp", 1795, "a sparse tensor is coalesced"),
        ),
        advice="Keep it dense with a mask, or make it sparse ahead of the loop.",
    ),
)
