"""Values that Python reads."""

from __future__ import annotations

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    ALLCLOSE,
    COPY,
    ELEMENTWISE,
    EMPTY,
    EQUAL,
    INDEX,
    NUMBER,
    ON_DEVICE,
    PAGEABLE,
    PINNED_RESULT,
    QUEUED,
    RANGE,
    READ,
    REDUCTION,
    SAME_DEVICE,
    SELECT,
    line,
    thread,
)


@snippet(1, READ)
def item_of_loss() -> Body:
    loss = torch.randn(64, device="cuda").square().mean()
    return lambda: loss.item()


@snippet(0, ELEMENTWISE, repairs=item_of_loss)
def detached_loss() -> Body:
    loss = torch.randn(64, device="cuda").square().mean()
    return lambda: loss.detach() * 1.0


@snippet(1, READ)
def float_of_sum() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: float(x.sum())


@snippet(1, READ)
def int_of_argmax() -> Body:
    logits = torch.randn(10, device="cuda")
    return lambda: int(logits.argmax())


@snippet(1, READ)
def bool_of_comparison() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: "large" if x.norm() > 3 else "small"


@snippet(1, COPY)
def list_of_values() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: x.tolist()


@snippet(5, READ)
def items_one_by_one() -> Body:
    x = torch.randn(5, device="cuda")
    return lambda: [value.item() for value in x]


@snippet(1, COPY, repairs=items_one_by_one)
def items_at_once() -> Body:
    x = torch.randn(5, device="cuda")
    return lambda: x.tolist()


@snippet(2, READ, thread("openvdb/fvdb-reality-capture", 144, "two reads of the loss in each step"))
def two_reads_of_losses() -> Body:
    first, second = torch.rand((), device="cuda"), torch.rand((), device="cuda")
    return lambda: (first.item(), second.item())


@snippet(1, COPY, repairs=two_reads_of_losses)
def one_read_of_losses() -> Body:
    first, second = torch.rand((), device="cuda"), torch.rand((), device="cuda")
    return lambda: torch.stack([first, second]).tolist()


@snippet(1, COPY)
def array_of_values() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: x.cpu().numpy()


@snippet(1, INDEX)
def range_of_a_tensor() -> Body:
    n = torch.tensor(4, device="cuda")
    return lambda: list(range(n))


@snippet(1, INDEX, thread("NVIDIA/TransformerEngine", 3268, "a read for each sequence"))
def list_repeated_by_a_tensor() -> Body:
    length = torch.tensor(4, device="cuda")
    return lambda: [False] * length


@snippet(0, ELEMENTWISE, RANGE, repairs=list_repeated_by_a_tensor)
def positions_compared_with_lengths() -> Body:
    lengths = torch.tensor([4, 2], device="cuda")
    return lambda: torch.arange(8, device="cuda") >= lengths[:, None]


@snippet(1, INDEX, thread("XPU-Forces/mojo_opset", 350, "said to stay on the device, and does not"))
def slice_up_to_a_tensor() -> Body:
    x, n = torch.randn(8, device="cuda"), torch.tensor(3, device="cuda")
    return lambda: x[:n]


@snippet(2, INDEX)
def slice_between_tensors() -> Body:
    x = torch.randn(8, device="cuda")
    begin, end = torch.tensor(1, device="cuda"), torch.tensor(5, device="cuda")
    return lambda: x[begin:end]


@snippet(1, SELECT)
def element_at_a_tensor() -> Body:
    x, i = torch.randn(8, device="cuda"), torch.tensor(3, device="cuda")
    return lambda: x[i]


@snippet(0, ELEMENTWISE, repairs=element_at_a_tensor)
def element_gathered() -> Body:
    x, i = torch.randn(8, device="cuda"), torch.tensor([3], device="cuda")
    return lambda: x.gather(0, i)


@snippet(
    1, SELECT, thread("huggingface/diffusers", 9475, "a table on the host, a step on the device")
)
def host_table_at_a_device_scalar() -> Body:
    table, step = torch.linspace(0, 1, 50), torch.tensor(7, device="cuda")
    return lambda: table[step]


@snippet(0, ELEMENTWISE, repairs=host_table_at_a_device_scalar)
def device_table_at_a_device_index() -> Body:
    table, step = torch.linspace(0, 1, 50).cuda(), torch.tensor([7], device="cuda")
    return lambda: table[step]


@snippet(1, NUMBER, thread("Koratahiu/Advanced_Optimizers", 5, "alpha=tensor read in each step"))
def alpha_of_a_tensor() -> Body:
    gradient, weight = torch.randn(8, device="cuda"), torch.randn(8, device="cuda")
    scale = torch.dot(gradient, weight)
    return lambda: gradient.sub(weight, alpha=scale)


@snippet(0, ELEMENTWISE, repairs=alpha_of_a_tensor)
def product_with_a_tensor() -> Body:
    gradient, weight = torch.randn(8, device="cuda"), torch.randn(8, device="cuda")
    scale = torch.dot(gradient, weight)
    return lambda: gradient - weight * scale


@snippet(1, NUMBER)
def full_of_a_tensor() -> Body:
    value = torch.tensor(2.5, device="cuda")
    return lambda: torch.full((4,), value, device="cuda")


@snippet(0, ON_DEVICE, repairs=full_of_a_tensor)
def expanded_tensor() -> Body:
    value = torch.tensor(2.5, device="cuda")
    return lambda: value.expand(4).clone()


@snippet(1, line("torch/_tensor.py", 1282, "(element == self).any().item()"), READ)
def membership() -> Body:
    x = torch.arange(5, device="cuda")
    return lambda: 3 in x


@snippet(1, EQUAL)
def equal() -> Body:
    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    return lambda: torch.equal(x, y)


@snippet(0, ELEMENTWISE, REDUCTION, repairs=equal)
def equal_on_the_device() -> Body:
    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    return lambda: (x == y).all()


@snippet(1, ALLCLOSE)
def allclose() -> Body:
    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    return lambda: torch.allclose(x, y)


@snippet(0, line("aten/src/ATen/native/cuda/Equal.cpp", 23, "returns where the shapes differ"))
def equal_of_two_shapes() -> Body:
    x, y = torch.ones(8, device="cuda"), torch.ones(4, device="cuda")
    return lambda: torch.equal(x, y)


@snippet(3, READ)
def largest_of_a_list() -> Body:
    losses = [torch.tensor(float(n), device="cuda") for n in range(4)]
    return lambda: max(losses)


@snippet(0, REDUCTION, repairs=largest_of_a_list)
def largest_of_a_stack() -> Body:
    losses = [torch.tensor(float(n), device="cuda") for n in range(4)]
    return lambda: torch.stack(losses).max()


@snippet(0, ELEMENTWISE)
def sum_of_a_list() -> Body:
    losses = [torch.tensor(float(n), device="cuda") for n in range(4)]
    return lambda: sum(losses)


@snippet(1, COPY)
def copy_to_host() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: x.to("cpu")


@snippet(0, PINNED_RESULT, QUEUED)
def late_copy_to_host() -> Body:
    x = torch.randn(64, device="cuda")
    return lambda: x.to("cpu", non_blocking=True)


@snippet(1, PAGEABLE)
def late_copy_into_pageable_memory() -> Body:
    x, host = torch.randn(70_000, device="cuda"), torch.empty(70_000)
    return lambda: host.copy_(x, non_blocking=True)


@snippet(0, QUEUED, repairs=late_copy_into_pageable_memory)
def late_copy_into_pinned_memory() -> Body:
    x, host = torch.randn(70_000, device="cuda"), torch.empty(70_000).pin_memory()
    return lambda: host.copy_(x, non_blocking=True)


@snippet(0, EMPTY)
def copy_of_nothing() -> Body:
    x = torch.empty(0, device="cuda")
    return lambda: x.cpu()


@snippet(0, SAME_DEVICE)
def item_of_the_host() -> Body:
    x = torch.randn(64)
    return lambda: (x.sum().item(), bool((x > 0).any()), x.tolist())


@snippet(1, COPY)
def type_of_the_host() -> Body:
    x = torch.arange(8.0, device="cuda")
    return lambda: x.type(torch.LongTensor)


@snippet(0, ELEMENTWISE, repairs=type_of_the_host)
def type_changed_in_place() -> Body:
    x = torch.arange(8.0, device="cuda")
    return lambda: x.long()
