"""Waits that only the backward makes, or does not make."""

from __future__ import annotations

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    ACCUMULATE,
    COPY,
    ELEMENTWISE,
    EXPAND,
    FILL_PATH,
    MASKED_FILL,
    MASKED_SCATTER,
    NONZERO,
    READ,
    SCATTER,
    SELECTED,
    WHERE,
    aten,
    line,
)

_MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


def _leaf(*shape: int) -> torch.Tensor:
    return (torch.rand(shape, device="cuda") + 0.1).requires_grad_()


@snippet(1, line(_MANUAL, 5405, "index_put with the mask"), EXPAND, NONZERO)
def of_rows_by_mask() -> Body:
    x = _leaf(64)
    loss = x[x > 0.5].sum()
    return lambda: loss.backward()


@snippet(0, WHERE, repairs=of_rows_by_mask)
def of_where() -> Body:
    x = _leaf(64)
    loss = torch.where(x > 0.5, x, 0.0).sum()
    return lambda: loss.backward()


@snippet(0, line(_MANUAL, 5405, "index_put with positions"), ACCUMULATE)
def of_rows_by_positions() -> Body:
    x, rows = _leaf(64), torch.tensor([1, 3], device="cuda")
    loss = x[rows].sum()
    return lambda: loss.backward()


@snippet(
    2,
    line("tools/autograd/derivatives.yaml", 896, "index_put of zeros"),
    line("tools/autograd/derivatives.yaml", 897, "the gradient indexed"),
    EXPAND,
)
def of_rows_assigned_by_mask() -> Body:
    x, new = _leaf(64), torch.ones((), device="cuda", requires_grad=True)
    y = x * 1
    y[x > 0.5] = new
    loss = y.sum()
    return lambda: loss.backward()


@snippet(
    0, line("tools/autograd/derivatives.yaml", 896, "index_put of a zero of the host"), FILL_PATH
)
def of_a_number_assigned_by_mask() -> Body:
    x = _leaf(64)
    y = x * 1
    y[x > 0.5] = 3.0
    loss = y.sum()
    return lambda: loss.backward()


@snippet(1, aten("TensorAdvancedIndexing.cpp", 2419, "the gradient selected by the mask"), SELECTED)
def of_masked_scatter() -> Body:
    mask, source = torch.arange(8, device="cuda") > 3, _leaf(4)
    loss = torch.zeros(8, device="cuda").masked_scatter(mask, source).sum()
    return lambda: loss.backward()


@snippet(0, aten("TensorAdvancedIndexing.cpp", 2643, "scattered by the mask"), MASKED_SCATTER)
def of_masked_select() -> Body:
    x = _leaf(8)
    loss = x.masked_select(torch.arange(8, device="cuda") > 3).sum()
    return lambda: loss.backward()


@snippet(0, MASKED_FILL)
def of_masked_fill() -> Body:
    x = _leaf(8)
    loss = x.masked_fill(torch.arange(8, device="cuda") > 3, 0.0).sum()
    return lambda: loss.backward()


@snippet(0, line(_MANUAL, 1912, "CUDA compares on the device; the CPU reads"))
def of_the_largest() -> Body:
    x = _leaf(8)
    loss = x.max() + x.min()
    return lambda: loss.backward()


@snippet(0, line(_MANUAL, 1912, "CUDA compares on the device; the CPU reads"))
def of_the_median() -> Body:
    x = _leaf(9)
    loss = x.median()
    return lambda: loss.backward()


@snippet(0, SCATTER)
def of_the_largest_of_rows() -> Body:
    x = _leaf(8, 3)
    loss = (
        x.max(1).values.sum() + x.amax(0).sum() + x.topk(2, 1).values.sum() + x.sort(1).values[0, 0]
    )
    return lambda: loss.backward()


@snippet(1, line(_MANUAL, 875, "nonzero of what is 0"), NONZERO)
def of_a_product() -> Body:
    x = _leaf(8)
    loss = x.prod()
    return lambda: loss.backward()


@snippet(1, line(_MANUAL, 909, "item() of the number of zeros"), READ)
def of_products_of_rows() -> Body:
    x = _leaf(8, 3)
    loss = x.prod(1).sum()
    return lambda: loss.backward()


@snippet(0, ELEMENTWISE, repairs=of_a_product)
def of_a_product_by_logarithms() -> Body:
    x = _leaf(8)
    loss = x.log().sum().exp()
    return lambda: loss.backward()


@snippet(1, aten("ReduceOps.cpp", 640, "whether any is 0"), READ)
def of_cumulative_products() -> Body:
    x = _leaf(8)
    loss = x.cumprod(0).sum()
    return lambda: loss.backward()


@snippet(0, ELEMENTWISE)
def of_cumulative_sums() -> Body:
    x = _leaf(8)
    loss = x.cumsum(0).sum() + x.norm() + x.std() + x.clamp(min=0.3).sum() + x.logsumexp(0)
    return lambda: loss.backward()


@snippet(0, aten("Repeat.h", 33, "the total is what was given"), SCATTER)
def of_repeated_rows() -> Body:
    x, times = _leaf(3), torch.tensor([1, 0, 2], device="cuda")
    loss = x.repeat_interleave(times, output_size=3).sum()
    return lambda: loss.backward()


@snippet(1, line(_MANUAL, 7291, "the gradient goes back to where the input was, blocking"), COPY)
def of_a_copy_to_host() -> Body:
    x = _leaf(8)
    loss = x.cpu().sum()
    return lambda: loss.backward()


@snippet(1, line(_MANUAL, 7291, "the gradient goes back to where the input was, blocking"), COPY)
def of_a_leaf_on_the_host() -> Body:
    x = torch.rand(8, requires_grad=True)
    loss = x.cuda().square().sum()
    return lambda: loss.backward()


@snippet(0, SCATTER)
def of_gathered_elements() -> Body:
    x, places = _leaf(8), torch.tensor([1, 3], device="cuda")
    loss = x.gather(0, places).sum() + x.index_select(0, places).sum()
    return lambda: loss.backward()
