"""Shapes that depend on data, and operators that only look so."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, Since, snippet
from tests.cases.corpus.sources import (
    BINS_HIGH,
    BINS_LOW,
    COPY,
    ELEMENTWISE,
    HISTOGRAM,
    INDEX_KERNEL,
    ON_DEVICE,
    ONE_HOT,
    RANDOM,
    REDUCTION,
    REPEATS,
    REPEATS_SIGN,
    SCAN,
    SCATTER,
    SEARCH,
    SELECTED,
    SHAPE,
    SORT,
    TOPK,
    UNIQUE,
    UNIQUE_COUNTS,
    UNIQUE_DIM,
    aten,
    line,
    thread,
)


@snippet(1, UNIQUE)
def unique() -> Body:
    x = torch.tensor([1, 2, 1, 3], device="cuda")
    return lambda: x.unique()


@snippet(0, SORT, ELEMENTWISE, repairs=unique)
def number_of_unique_by_sorting() -> Body:
    x = torch.tensor([1, 2, 1, 3], device="cuda")

    def body() -> object:
        values = x.sort().values
        return (values[1:] != values[:-1]).sum() + 1

    return body


@snippet(1, UNIQUE_COUNTS)
def unique_with_counts() -> Body:
    x = torch.tensor([1, 2, 1, 3], device="cuda")
    return lambda: x.unique(return_counts=True, return_inverse=True)


@snippet(1, UNIQUE)
def unique_consecutive() -> Body:
    x = torch.tensor([1, 1, 2, 3], device="cuda")
    return lambda: x.unique_consecutive()


@snippet(1, aten("cuda/UniqueCub.cu", 293, "memcpy_and_sync of the count"))
def unique_bools() -> Body:
    x = torch.tensor([True, False, True], device="cuda")
    return lambda: x.unique()


@snippet(1, UNIQUE_DIM, exact=False)
def unique_rows() -> Body:
    x = torch.tensor([[1, 2], [1, 2], [3, 4]], device="cuda")
    return lambda: x.unique(dim=0)


@snippet(2, REPEATS, REPEATS_SIGN)
def repeat_interleave() -> Body:
    x, times = torch.arange(3, device="cuda"), torch.tensor([1, 0, 2], device="cuda")
    return lambda: x.repeat_interleave(times)


@snippet(
    0,
    aten("Repeat.h", 33, "the total is what was given"),
    thread("facebookresearch/fairchem", 2123, "repaired by giving the size"),
    repairs=repeat_interleave,
)
def repeat_interleave_of_known_size() -> Body:
    x, times = torch.arange(3, device="cuda"), torch.tensor([1, 0, 2], device="cuda")
    return lambda: x.repeat_interleave(times, output_size=3)


@snippet(0, aten("Repeat.cpp", 127, "expanded and copied"))
def repeat_interleave_by_a_number() -> Body:
    x = torch.arange(3, device="cuda")
    return lambda: x.repeat_interleave(2)


@snippet(2, REPEATS, REPEATS_SIGN)
def repeat_interleave_by_one_tensor() -> Body:
    x, times = torch.arange(3, device="cuda"), torch.tensor(2, device="cuda")
    return lambda: x.repeat_interleave(times)


@snippet(0, SHAPE)
def repeat_interleave_of_the_host() -> Body:
    x, times = torch.arange(3), torch.tensor([1, 0, 2])
    return lambda: x.repeat_interleave(times)


@snippet(2, BINS_LOW, BINS_HIGH)
def bincount() -> Body:
    x = torch.tensor([1, 2, 1, 3], device="cuda")
    return lambda: x.bincount()


@snippet(
    2, BINS_LOW, BINS_HIGH, thread("facebookresearch/fairchem", 2203, "one of the waits removed")
)
def bincount_of_known_length() -> Body:
    x = torch.tensor([1, 2, 1, 3], device="cuda")
    return lambda: x.bincount(minlength=8)


@snippet(0, SCATTER, repairs=bincount_of_known_length)
def counts_scattered() -> Body:
    x = torch.tensor([1, 2, 1, 3], device="cuda")
    return lambda: torch.zeros(8, dtype=torch.long, device="cuda").scatter_add_(
        0, x, torch.ones_like(x)
    )


@snippet(1, ONE_HOT)
def one_hot() -> Body:
    x = torch.tensor([1, 2, 0], device="cuda")
    return lambda: F.one_hot(x)


@snippet(
    0, aten("Onehot.cpp", 58, "only the CPU compares with the largest"), SCATTER, repairs=one_hot
)
def one_hot_of_known_classes() -> Body:
    x = torch.tensor([1, 2, 0], device="cuda")
    return lambda: F.one_hot(x, 10)


@snippet(0, ELEMENTWISE, repairs=one_hot)
def one_hot_by_comparison() -> Body:
    x = torch.tensor([1, 2, 0], device="cuda")
    return lambda: x[:, None] == torch.arange(10, device="cuda")


@snippet(2, HISTOGRAM)
def histogram_of_unknown_range() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: torch.histc(x, bins=8)


@snippet(
    0,
    aten("cuda/SummaryOps.cu", 328, "looks for the range only where it is empty"),
    repairs=histogram_of_unknown_range,
)
def histogram_of_known_range() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: torch.histc(x, bins=8, min=-3, max=3)


@snippet(
    3,
    aten("TensorCompare.cpp", 544, "unique elements"),
    aten("TensorCompare.cpp", 546, "unique test elements"),
    aten("TensorCompare.cpp", 566, "a number copied into one element"),
)
def isin_of_many() -> Body:
    x, tested = torch.arange(100, device="cuda"), torch.arange(50, 150, device="cuda")
    return lambda: torch.isin(x, tested)


@snippet(0, aten("TensorCompare.cpp", 1005, "few are compared by a kernel"))
def isin_of_few() -> Body:
    x, tested = torch.arange(100, device="cuda"), torch.tensor([3, 5], device="cuda")
    return lambda: torch.isin(x, tested)


@snippet(
    2,
    aten("Itertools.cpp", 70, "masked_select of each grid"),
    SELECTED,
    since=Since(
        version="2.14",
        waits=0,
        evidence=thread("pytorch/pytorch", 74324, "their number is known, so nonzero_static does"),
    ),
)
def combinations() -> Body:
    x = torch.arange(4, device="cuda")
    return lambda: torch.combinations(x)


@snippet(0, ON_DEVICE)
def cartesian_product() -> Body:
    x = torch.arange(4, device="cuda")
    return lambda: torch.cartesian_prod(x, x)


@snippet(
    1,
    aten("Correlation.cpp", 128, "is_scalar_tensor_true(norm_factor.le(0))"),
    aten("cuda/Equal.cpp", 45, "equal() reads"),
)
def covariance() -> Body:
    x = torch.randn(3, 16, device="cuda")
    return lambda: torch.cov(x)


@snippet(1, COPY, thread("roboflow/rf-detr", 1369, "one list for all, once one for each image"))
def split_by_sizes_of_the_device() -> Body:
    x, sizes = torch.randn(8, 2, device="cuda"), torch.tensor([3, 5], device="cuda")
    return lambda: x.split(sizes.tolist())


@snippet(0, SHAPE, repairs=split_by_sizes_of_the_device)
def split_by_sizes_of_the_host() -> Body:
    x, sizes = torch.randn(8, 2, device="cuda"), torch.tensor([3, 5])
    return lambda: (x.split(sizes.tolist()), x.tensor_split(torch.tensor([3])))


@snippet(0, TOPK)
def topk() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: x.topk(4)


@snippet(0, SORT)
def sort_and_argsort() -> Body:
    x = torch.randn(8, 64, device="cuda")
    return lambda: (x.sort(), x.argsort(dim=0, descending=True))


@snippet(0, REDUCTION)
def argmax_and_median() -> Body:
    x = torch.randn(8, 64, device="cuda")
    return lambda: (x.argmax(1), x.max(1), x.median(1), x.kthvalue(3, 1))


@snippet(0, SCAN)
def cumulative_sums() -> Body:
    x = torch.rand(64, device="cuda")
    return lambda: (x.cumsum(0), x.cumprod(0), x.cummax(0))


@snippet(0, SEARCH)
def buckets() -> Body:
    x, edges = torch.rand(64, device="cuda"), torch.linspace(0, 1, 9).cuda()
    return lambda: (torch.bucketize(x, edges), torch.searchsorted(edges, x))


@snippet(0, aten("Distributions.cpp", 599, "_assert_async, checked by a kernel"))
def multinomial() -> Body:
    x = torch.rand(4, 8, device="cuda")
    return lambda: x.multinomial(2)


@snippet(0, aten("Sorting.cpp", 261, "only the CPU looks at q"), SORT)
def quantiles() -> Body:
    x, q = torch.rand(64, device="cuda"), torch.linspace(0, 1, 4).cuda()
    return lambda: (x.quantile(0.5), x.quantile(q), x.nanmedian())


@snippet(0, REDUCTION)
def modes() -> Body:
    x = torch.randint(0, 4, (8, 64), device="cuda")
    return lambda: x.mode(1)


@snippet(1, aten("cuda/TensorModeKernel.cu", 175, "memcpy_and_sync of each slice"), exact=False)
def mode_of_a_long_row() -> Body:
    x = torch.randint(0, 4, (3000,), device="cuda")
    return lambda: x.mode()


@snippet(0, RANDOM)
def random_permutation() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: x[torch.randperm(64, device="cuda")]


@snippet(0, INDEX_KERNEL, line("aten/src/ATen/native/TensorShape.cpp", 4367, "views"))
def upper_triangle() -> Body:
    x = torch.randn(4, 4, device="cuda")
    return lambda: (x[torch.triu_indices(4, 4, device="cuda").unbind()], x.tril(), x.diag())
