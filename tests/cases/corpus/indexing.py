"""Positions as index."""

from __future__ import annotations

import numpy as np
import torch
from tests.cases.corpus.snippet import Body, Since, snippet
from tests.cases.corpus.sources import (
    COPY,
    ELEMENT,
    FILL,
    FILLED_ELEMENT,
    FILLED_POSITIONS,
    HOST_INDEX,
    INDEX_KERNEL,
    ON_DEVICE,
    SCATTER,
    SHAPE,
    SLICE_FILL,
    TENSOR,
    VALUE,
    WHERE,
    WHERE_VALUE,
    aten,
)


@snippet(1, TENSOR)
def rows_by_a_list() -> Body:
    x = torch.randn(8, 3, device="cuda")
    return lambda: x[[0, 2]]


@snippet(0, INDEX_KERNEL, repairs=rows_by_a_list)
def rows_by_a_device_index() -> Body:
    x, rows = torch.randn(8, 3, device="cuda"), torch.tensor([0, 2], device="cuda")
    return lambda: x[rows]


@snippet(1, TENSOR)
def rows_by_an_array() -> Body:
    x, rows = torch.randn(8, 3, device="cuda"), np.array([0, 2])
    return lambda: x[rows]


@snippet(1, HOST_INDEX)
def rows_by_a_host_index() -> Body:
    x, rows = torch.randn(8, 3, device="cuda"), torch.tensor([0, 2])
    return lambda: x[rows]


@snippet(2, HOST_INDEX)
def elements_by_two_host_indices() -> Body:
    x = torch.randn(8, 3, device="cuda")
    rows, columns = torch.tensor([0, 2]), torch.tensor([1, 1])
    return lambda: x[rows, columns]


@snippet(0, SCATTER)
def gather_and_scatter() -> Body:
    x, places = torch.randn(8, device="cuda"), torch.tensor([0, 2], device="cuda")

    def body() -> object:
        found = x.gather(0, places)
        return x.scatter(0, places, found).scatter_add_(0, places, found)

    return body


@snippet(0, INDEX_KERNEL)
def index_select_and_take() -> Body:
    x, rows = torch.randn(8, 3, device="cuda"), torch.tensor([0, 2], device="cuda")
    return lambda: (
        x.index_select(0, rows),
        x.take(rows),
        torch.take_along_dim(x, rows[:, None], 0),
    )


@snippet(0, INDEX_KERNEL)
def index_add_and_copy() -> Body:
    x, rows = torch.randn(8, 3, device="cuda"), torch.tensor([0, 2], device="cuda")
    new = torch.ones(2, 3, device="cuda")
    return lambda: (x.index_add(0, rows, new), x.index_copy(0, rows, new))


@snippet(1, VALUE, since=Since(version="2.15", waits=0, evidence=FILLED_POSITIONS))
def number_assigned_at_positions() -> Body:
    x, rows = torch.randn(8, device="cuda"), torch.tensor([0, 2], device="cuda")

    def body() -> object:
        x[rows] = 3.0
        return x

    return body


@snippet(0, INDEX_KERNEL, repairs=number_assigned_at_positions)
def number_filled_at_positions() -> Body:
    x, rows = torch.randn(8, device="cuda"), torch.tensor([0, 2], device="cuda")
    return lambda: x.index_fill_(0, rows, 3.0)


@snippet(0, INDEX_KERNEL, repairs=number_assigned_at_positions)
def tensor_assigned_at_positions() -> Body:
    x, rows = torch.randn(8, device="cuda"), torch.tensor([0, 2], device="cuda")
    value = torch.full((), 3.0, device="cuda")

    def body() -> object:
        x[rows] = value
        return x

    return body


@snippet(1, aten("TensorAdvancedIndexing.cpp", 1976, "source.item()"))
def device_scalar_filled_at_positions() -> Body:
    x, rows = torch.randn(8, device="cuda"), torch.tensor([0, 2], device="cuda")
    value = torch.full((), 3.0, device="cuda")
    return lambda: x.index_fill_(0, rows, value)


@snippet(1, ELEMENT, COPY, since=Since(version="2.15", waits=0, evidence=FILLED_ELEMENT))
def number_assigned_to_an_element() -> Body:
    x = torch.randn(8, device="cuda")

    def body() -> object:
        x[0] = 3.0
        return x

    return body


@snippet(0, FILL, repairs=number_assigned_to_an_element)
def element_filled() -> Body:
    x = torch.randn(8, device="cuda")
    return lambda: x[0].fill_(3.0)


@snippet(1, ELEMENT, COPY, since=Since(version="2.15", waits=0, evidence=FILLED_ELEMENT))
def number_assigned_to_an_element_of_a_matrix() -> Body:
    x = torch.randn(8, 3, device="cuda")

    def body() -> object:
        x[0, 1] = 3.0
        return x

    return body


@snippet(0, SLICE_FILL, FILL)
def number_assigned_to_a_row() -> Body:
    x = torch.randn(8, 3, device="cuda")

    def body() -> object:
        x[0] = 3.0
        x[1:3, 1] = 2.0
        x[..., 0] = 1.0
        return x

    return body


@snippet(1, ELEMENT, COPY)
def host_rows_assigned_to_a_slice() -> Body:
    x, new = torch.randn(8, 3, device="cuda"), torch.ones(2, 3)

    def body() -> object:
        x[:2] = new
        return x

    return body


@snippet(0, ON_DEVICE)
def device_rows_assigned_to_a_slice() -> Body:
    x, new = torch.randn(8, 3, device="cuda"), torch.ones(2, 3, device="cuda")

    def body() -> object:
        x[:2] = new
        x[0] = x[1]
        return x

    return body


@snippet(1, aten("cuda/Copy.cu", 488, "copied to the host, blocking"))
def device_element_assigned_to_the_host() -> Body:
    losses, loss = torch.zeros(8), torch.rand((), device="cuda")

    def body() -> object:
        losses[3] = loss
        return losses

    return body


@snippet(0, ON_DEVICE, repairs=device_element_assigned_to_the_host)
def device_element_assigned_to_the_device() -> Body:
    losses, loss = torch.zeros(8, device="cuda"), torch.rand((), device="cuda")

    def body() -> object:
        losses[3] = loss
        return losses

    return body


@snippet(0, SHAPE)
def views_by_numbers() -> Body:
    x = torch.randn(8, 3, device="cuda")
    return lambda: (x[0], x[-1, 2], x[1:5:2], x[..., None], x[:, 0], x.narrow(0, 1, 2))


@snippet(1, WHERE_VALUE)
def where_of_a_host_scalar() -> Body:
    x, zero = torch.randn(8, device="cuda"), torch.tensor(0.0)
    return lambda: torch.where(x > 0, x, zero)


@snippet(0, WHERE, repairs=where_of_a_host_scalar)
def where_of_a_number() -> Body:
    x = torch.randn(8, device="cuda")
    return lambda: (torch.where(x > 0, x, 0.0), torch.where(x > 0, 1.0, 0.0))


@snippet(0, ON_DEVICE)
def filled_with_a_device_scalar() -> Body:
    x, value = torch.randn(8, device="cuda"), torch.rand((), device="cuda")
    return lambda: x.fill_(value)


@snippet(1, aten("Fill.cpp", 58, "value.item() where the devices differ"))
def host_filled_with_a_device_scalar() -> Body:
    x, value = torch.randn(8), torch.rand((), device="cuda")
    return lambda: x.fill_(value)
