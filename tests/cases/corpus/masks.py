"""Boolean masks, as index and otherwise."""

from __future__ import annotations

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    ELEMENTWISE,
    EXPAND,
    FILL_PATH,
    FILL_VALUE,
    HOST_MASK,
    INDEX_KERNEL,
    MASKED_FILL,
    MASKED_SCATTER,
    NONZERO,
    REDUCTION,
    SCAN,
    SCATTER,
    SELECTED,
    SHAPE,
    SORT,
    STATIC,
    UNIQUE,
    WHERE,
    thread,
)


@snippet(1, EXPAND, NONZERO)
def rows_by_mask() -> Body:
    x = torch.randn(64, device="cuda")
    mask = x > 0
    return lambda: x[mask]


@snippet(1, EXPAND, NONZERO)
def mean_of_masked_loss() -> Body:
    loss = torch.rand(64, device="cuda")
    valid = torch.rand(64, device="cuda") > 0.2
    return lambda: loss[valid].mean()


@snippet(0, WHERE, REDUCTION, repairs=mean_of_masked_loss)
def weighted_mean_of_loss() -> Body:
    loss = torch.rand(64, device="cuda")
    valid = torch.rand(64, device="cuda") > 0.2
    return lambda: torch.where(valid, loss, 0.0).sum() / valid.sum()


@snippet(
    1, EXPAND, NONZERO, thread("facebookresearch/fairchem", 2203, "a count taken from a selection")
)
def number_of_the_selected() -> Body:
    loss = torch.rand(64, device="cuda")
    mask = loss > 0.5
    return lambda: loss[mask].numel()


@snippet(0, REDUCTION, repairs=number_of_the_selected)
def sum_of_the_mask() -> Body:
    loss = torch.rand(64, device="cuda")
    mask = loss > 0.5
    return lambda: mask.sum()


@snippet(1, NONZERO, thread("facebookresearch/fairchem", 2203, "a count taken from nonzero"))
def number_of_nonzeros() -> Body:
    x = torch.arange(8, device="cuda")
    return lambda: x.nonzero().numel()


@snippet(0, ELEMENTWISE, REDUCTION, repairs=number_of_nonzeros)
def nonzeros_summed() -> Body:
    x = torch.arange(8, device="cuda")
    return lambda: (x != 0).sum()


@snippet(0, REDUCTION)
def count_nonzero() -> Body:
    x = torch.arange(8, device="cuda")
    return lambda: torch.count_nonzero(x)


@snippet(0, FILL_PATH, MASKED_FILL)
def number_assigned_by_mask() -> Body:
    x = torch.randn(64, device="cuda")

    def body() -> object:
        x[x > 0] = 3.0
        return x

    return body


@snippet(0, FILL_PATH, MASKED_FILL)
def host_scalar_assigned_by_mask() -> Body:
    x, value = torch.randn(64, device="cuda"), torch.tensor(3.0)

    def body() -> object:
        x[x > 0] = value
        return x

    return body


@snippet(0, FILL_PATH, MASKED_FILL)
def number_assigned_by_row_mask() -> Body:
    x, rows = torch.randn(4, 8, device="cuda"), torch.tensor([1, 0, 1, 1], device="cuda").bool()

    def body() -> object:
        x[rows] = 0.0
        x[:, x[0] > 0] = 1.0
        return x

    return body


@snippet(
    1,
    EXPAND,
    NONZERO,
    thread("huggingface/diffusers", 13461, "a token on the device put in by mask"),
)
def device_scalar_assigned_by_mask() -> Body:
    x, value = torch.randn(64, device="cuda"), torch.zeros((), device="cuda")
    mask = x > 0

    def body() -> object:
        x[mask] = value
        return x

    return body


@snippet(0, WHERE, repairs=device_scalar_assigned_by_mask)
def device_scalar_chosen_by_mask() -> Body:
    x, value = torch.randn(64, device="cuda"), torch.zeros((), device="cuda")
    mask = x > 0
    return lambda: torch.where(mask, value, x)


@snippet(1, FILL_VALUE)
def masked_fill_of_a_device_scalar() -> Body:
    x, value = torch.randn(64, device="cuda"), torch.zeros((), device="cuda")
    mask = x > 0
    return lambda: x.masked_fill(mask, value)


@snippet(0, MASKED_FILL, repairs=masked_fill_of_a_device_scalar)
def masked_fill_of_a_number() -> Body:
    x = torch.randn(64, device="cuda")
    mask = x > 0
    return lambda: x.masked_fill(mask, float("-inf"))


@snippet(0, MASKED_FILL)
def masked_fill_of_a_host_scalar() -> Body:
    x, value = torch.randn(64, device="cuda"), torch.tensor(2.0)
    mask = x > 0
    return lambda: x.masked_fill(mask, value)


@snippet(1, EXPAND, NONZERO)
def packed_rows_assigned_by_mask() -> Body:
    x, mask = torch.zeros(8, device="cuda"), torch.arange(8, device="cuda") % 2 == 0
    packed = torch.ones(4, device="cuda")

    def body() -> object:
        x[mask] = packed
        return x

    return body


@snippet(0, MASKED_SCATTER, repairs=packed_rows_assigned_by_mask)
def packed_rows_scattered_by_mask() -> Body:
    x, mask = torch.zeros(8, device="cuda"), torch.arange(8, device="cuda") % 2 == 0
    packed = torch.ones(4, device="cuda")
    return lambda: x.masked_scatter(mask, packed)


@snippet(0, SCAN, SCATTER, WHERE, repairs=packed_rows_assigned_by_mask)
def packed_rows_gathered_by_count() -> Body:
    x, mask = torch.zeros(8, device="cuda"), torch.arange(8, device="cuda") % 2 == 0
    packed = torch.ones(4, device="cuda")

    def body() -> object:
        place = (mask.long().cumsum(0) - 1).clamp(min=0)
        return torch.where(mask, packed.gather(0, place), x)

    return body


@snippet(2, EXPAND, NONZERO)
def partition_by_mask() -> Body:
    x, mask = torch.randn(8, 3, device="cuda"), torch.arange(8, device="cuda") % 2 == 0
    return lambda: torch.cat([x[mask], x[~mask]])


@snippet(0, SORT, INDEX_KERNEL, repairs=partition_by_mask)
def partition_by_sorting() -> Body:
    x, mask = torch.randn(8, 3, device="cuda"), torch.arange(8, device="cuda") % 2 == 0
    return lambda: x[torch.argsort(~mask, stable=True)]


@snippet(4, UNIQUE, EXPAND, thread("ultralytics/yolov5", 9052, "a loop over unique images"))
def loop_over_unique_labels() -> Body:
    labels = torch.tensor([0, 1, 2, 1, 0], device="cuda")
    x = torch.randn(5, device="cuda")
    return lambda: [x[labels == label].sum() for label in labels.unique()]


@snippet(0, SCATTER, repairs=loop_over_unique_labels)
def sums_scattered_by_label() -> Body:
    labels = torch.tensor([0, 1, 2, 1, 0], device="cuda")
    x = torch.randn(5, device="cuda")
    return lambda: torch.zeros(3, device="cuda").scatter_add_(0, labels, x)


@snippet(2, EXPAND, NONZERO)
def added_in_place_by_mask() -> Body:
    x = torch.randn(64, device="cuda")
    mask = x > 0

    def body() -> object:
        x[mask] += 1.0
        return x

    return body


@snippet(0, ELEMENTWISE, repairs=added_in_place_by_mask)
def mask_added_in_place() -> Body:
    x = torch.randn(64, device="cuda")
    mask = x > 0
    return lambda: x.add_(mask.float())


@snippet(1, EXPAND, NONZERO)
def accumulated_by_mask() -> Body:
    x, mask = torch.zeros(8, device="cuda"), torch.arange(8, device="cuda") % 2 == 0
    return lambda: x.index_put_((mask,), torch.ones((), device="cuda"), accumulate=True)


@snippet(1, EXPAND, NONZERO)
def columns_by_mask() -> Body:
    x, mask = torch.randn(4, 8, device="cuda"), torch.arange(8, device="cuda") > 3
    return lambda: x[:, mask]


@snippet(1, NONZERO, thread("sgl-project/sglang", 30054, "nonzero replaced by what waits as well"))
def rows_by_nonzero() -> Body:
    x, mask = torch.randn(8, 3, device="cuda"), torch.arange(8, device="cuda") > 3
    return lambda: x[mask.nonzero().squeeze(1)]


@snippet(
    0, STATIC, INDEX_KERNEL, thread("vllm-project/vllm", 19578, "the number is known on the host")
)
def rows_by_static_nonzero() -> Body:
    x, mask = torch.randn(8, 3, device="cuda"), torch.arange(8, device="cuda") > 3
    return lambda: x[mask.nonzero_static(size=4).squeeze(1)]


@snippet(1, SELECTED, NONZERO)
def masked_select() -> Body:
    x = torch.randn(64, device="cuda")
    mask = x > 0
    return lambda: x.masked_select(mask)


@snippet(1, NONZERO)
def where_of_one_argument() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: torch.where(x > 0)


@snippet(1, NONZERO)
def argwhere() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: torch.argwhere(x > 0)


@snippet(0, WHERE, repairs=where_of_one_argument)
def where_of_three_arguments() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: torch.where(x > 0, x, 0.0)


@snippet(0, HOST_MASK)
def rows_by_host_mask() -> Body:
    x, mask = torch.randn(8, device="cuda"), torch.arange(8) > 3
    return lambda: x[mask]


@snippet(0, SHAPE)
def host_rows_by_host_mask() -> Body:
    x = torch.randn(64)
    return lambda: (x[x > 0], x.nonzero(), x.unique(), x.masked_select(x > 1))


@snippet(1, NONZERO)
def detections_above_a_score() -> Body:
    boxes, scores = torch.rand(16, 4, device="cuda"), torch.rand(16, device="cuda")

    def body() -> object:
        keep = (scores > 0.5).nonzero().flatten()
        return boxes[keep], scores[keep]

    return body


@snippet(0, SORT, INDEX_KERNEL, repairs=detections_above_a_score)
def best_detections() -> Body:
    boxes, scores = torch.rand(16, 4, device="cuda"), torch.rand(16, device="cuda")

    def body() -> object:
        best, keep = scores.topk(4)
        return boxes[keep], best, best > 0.5

    return body
