"""Control flow, on values and on what is known on the host."""

from __future__ import annotations

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    ASSERT_ASYNC,
    ELEMENTWISE,
    MASKED_FILL,
    READ,
    REDUCTION,
    SHAPE,
    UNBIND,
    WHERE,
    line,
    thread,
)


@snippet(1, READ)
def assertion() -> Body:
    boxes = torch.rand(8, 4, device="cuda")

    def body() -> object:
        assert (boxes >= 0).all()
        return boxes

    return body


@snippet(0, ASSERT_ASYNC, repairs=assertion)
def late_assertion() -> Body:
    boxes = torch.rand(8, 4, device="cuda")
    return lambda: torch._assert_async((boxes >= 0).all())


@snippet(1, READ, thread("facebookresearch/fairchem", 2203, "a check of the loss for infinity"))
def guard_for_infinity() -> Body:
    loss = torch.rand(8, device="cuda")

    def body() -> object:
        return loss if torch.isfinite(loss).all() else loss.nan_to_num()

    return body


@snippet(0, ELEMENTWISE, repairs=guard_for_infinity)
def infinity_replaced() -> Body:
    loss = torch.rand(8, device="cuda")
    return lambda: loss.nan_to_num(nan=0.0)


@snippet(1, READ, thread("lucidrains/x-transformers", 355, "a guard before a fill"))
def guard_for_a_fill() -> Body:
    x, empty = torch.rand(8, 4, device="cuda"), torch.zeros(8, 1, device="cuda").bool()

    def body() -> object:
        return x.masked_fill(empty, 0.0) if empty.any() else x

    return body


@snippet(0, MASKED_FILL, repairs=guard_for_a_fill)
def fill_without_a_guard() -> Body:
    x, empty = torch.rand(8, 4, device="cuda"), torch.zeros(8, 1, device="cuda").bool()
    return lambda: x.masked_fill(empty, 0.0)


@snippet(1, READ, thread("SimplexLab/TorchJD", 557, "a guard for small norms"))
def guard_for_a_norm() -> Body:
    x = torch.rand(8, device="cuda")

    def body() -> object:
        norm = x.norm()
        return torch.zeros_like(x) if norm < 1e-8 else x / norm

    return body


@snippet(0, WHERE, repairs=guard_for_a_norm)
def norm_chosen() -> Body:
    x = torch.rand(8, device="cuda")

    def body() -> object:
        norm = x.norm()
        return torch.where(norm < 1e-8, 0.0, x / norm)

    return body


@snippet(2, READ, thread("huggingface/trl", 6842, "a number of tokens that decides twice"))
def guards_for_a_count() -> Body:
    valid = torch.ones(8, device="cuda").bool()

    def body() -> object:
        number = valid.sum()
        if number == 0:
            return []
        return list(range(0, number, 4))

    return body


@snippet(4, READ)
def loop_until_small() -> Body:
    x = torch.full((4,), 8.0, device="cuda")

    def body() -> object:
        value = x
        while (value > 1).any():
            value = value / 2
        return value

    return body


@snippet(0, ELEMENTWISE, repairs=loop_until_small)
def loop_of_known_length() -> Body:
    x = torch.full((4,), 8.0, device="cuda")

    def body() -> object:
        value = x
        for _ in range(3):
            value = torch.where(value > 1, value / 2, value)
        return value

    return body


@snippet(1, READ, thread("huggingface/transformers", 39213, "positions looked at in each layer"))
def guard_that_reads_first() -> Body:
    positions = torch.arange(8, device="cuda")

    def body() -> object:
        return bool((positions.diff() >= 0).all()) and positions.shape[0] > 16

    return body


@snippet(0, SHAPE, repairs=guard_that_reads_first)
def guard_that_reads_last() -> Body:
    positions = torch.arange(8, device="cuda")

    def body() -> object:
        return positions.shape[0] > 16 and bool((positions.diff() >= 0).all())

    return body


@snippet(0, SHAPE)
def guards_of_shape() -> Body:
    x = torch.rand(8, 4, device="cuda")

    def body() -> object:
        if x.shape[0] > 4 and x.numel() and len(x) == x.size(0) and x.dim() == 2:
            return x.new_empty(x.shape)
        return None

    return body


@snippet(0, SHAPE)
def guards_of_kind() -> Body:
    x, bias = torch.rand(8, device="cuda"), None

    def body() -> object:
        if bias is None and x.is_cuda and x.device.type == "cuda" and x.dtype.is_floating_point:
            return isinstance(x, torch.Tensor) and x.is_contiguous() and not x.requires_grad
        return x is bias

    return body


@snippet(0, UNBIND, line("torch/_tensor.py", 1223, "iter(self.unbind(0))"))
def loop_over_rows() -> Body:
    x, y = torch.rand(4, 3, device="cuda"), torch.rand(4, 3, device="cuda")

    def body() -> object:
        first, *_ = x
        total = first * 0
        for number, (left, right) in enumerate(zip(x, y, strict=True)):
            total = total + left * right * number
        return total

    return body


@snippet(0, ELEMENTWISE, REDUCTION)
def comparisons_kept() -> Body:
    x, y = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
    return lambda: ((x == y).any(), (x > 0).all() & torch.isfinite(y).all(), x.isnan().sum())


@snippet(0, SHAPE)
def identity_of_tensors() -> Body:
    x, y = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")

    def body() -> object:
        known = {x: "x", y: "y"}
        return known[x], hash(y), id(x) == id(y), x.data_ptr() == y.data_ptr()

    return body


@snippet(0, SHAPE)
def guard_on_a_host_tensor() -> Body:
    lengths, x = torch.tensor([3, 5]), torch.rand(2, 5, device="cuda")

    def body() -> object:
        if lengths.max() > 4:
            return x[:, : int(lengths.max())]
        return [x[n, :length] for n, length in enumerate(lengths.tolist())]

    return body
