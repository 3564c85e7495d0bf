"""Data that goes to the device."""

from __future__ import annotations

import numpy as np
import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    COPY,
    ELEMENTWISE,
    FILL,
    HOST_SCALAR,
    ON_DEVICE,
    PAGEABLE,
    QUEUED,
    RANDOM,
    RANGE,
    SAME_DEVICE,
    TEMPORARY,
    TENSOR,
    aten,
    thread,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_LARGE = 70_000


@snippet(1, COPY)
def moved_by_cuda() -> Body:
    x = torch.randn(_LARGE)
    return lambda: x.cuda()


@snippet(1, COPY)
def moved_with_another_type() -> Body:
    x = torch.randn(_LARGE)
    return lambda: x.to("cuda", torch.float16)


@snippet(1, COPY)
def pinned_and_blocking() -> Body:
    x = torch.randn(_LARGE).pin_memory()
    return lambda: x.to("cuda")


@snippet(0, QUEUED, repairs=pinned_and_blocking)
def pinned_and_not_blocking() -> Body:
    x = torch.randn(_LARGE).pin_memory()
    return lambda: x.to("cuda", non_blocking=True)


@snippet(1, PAGEABLE, thread("vllm-project/vllm", 53491, "late copies of pageable memory block"))
def pageable_and_not_blocking() -> Body:
    x = torch.randn(_LARGE)
    return lambda: x.to("cuda", non_blocking=True)


@snippet(0, QUEUED, repairs=pageable_and_not_blocking)
def pinned_into_a_buffer() -> Body:
    x, buffer = torch.randn(_LARGE).pin_memory(), torch.empty(_LARGE, device="cuda")
    return lambda: buffer.copy_(x, non_blocking=True)


@snippet(1, TEMPORARY, PAGEABLE)
def pinned_with_gaps() -> Body:
    x = torch.randn(_LARGE, 2).pin_memory()[:, 0]
    return lambda: x.to("cuda", non_blocking=True)


@snippet(1, COPY)
def copied_into_a_buffer() -> Body:
    x, buffer = torch.randn(_LARGE), torch.empty(_LARGE, device="cuda")
    return lambda: buffer.copy_(x)


@snippet(1, TENSOR, thread("vllm-project/vllm", 41429, "tensors made of lists in each step"))
def tensor_of_a_list() -> Body:
    sizes = [1, 2, 3]
    return lambda: torch.tensor(sizes, device="cuda")


@snippet(0, FILL, RANGE, repairs=tensor_of_a_list)
def tensor_made_on_the_device() -> Body:
    return lambda: (
        torch.zeros(3, device="cuda"),
        torch.full((3,), 2.0, device="cuda"),
        torch.arange(1, 4, device="cuda"),
        torch.linspace(0, 1, 4, device="cuda"),
        torch.eye(3, device="cuda"),
    )


@snippet(1, TENSOR)
def tensor_of_a_number() -> Body:
    return lambda: torch.tensor(0.5, device="cuda")


@snippet(0, FILL, repairs=tensor_of_a_number)
def number_filled_in() -> Body:
    return lambda: torch.full((), 0.5, device="cuda")


@snippet(1, COPY, thread("allenai/OLMo-core", 68, "a loss that begins on the host"))
def zero_moved() -> Body:
    return lambda: torch.tensor(0.0).to("cuda")


@snippet(0, FILL, repairs=zero_moved)
def zero_made() -> Body:
    return lambda: torch.zeros((), device="cuda")


@snippet(1, COPY, thread("Lightning-AI/torchmetrics", 3284, "a late copy of a value that dies"))
def number_moved_late() -> Body:
    x = torch.rand(8, device="cuda")
    return lambda: torch.where(x > 0.5, x, torch.tensor(0.25).to(x.device))


@snippet(1, COPY)
def array_as_tensor() -> Body:
    array = np.ones(_LARGE, dtype=np.float32)
    return lambda: torch.as_tensor(array, device="cuda")


@snippet(1, COPY)
def array_shared_then_moved() -> Body:
    array = np.ones(_LARGE, dtype=np.float32)
    return lambda: torch.from_numpy(array).cuda()


@snippet(1, TENSOR)
def new_tensor() -> Body:
    x = torch.rand(8, device="cuda")
    return lambda: x.new_tensor([1.0, 2.0])


@snippet(0, FILL, repairs=new_tensor)
def new_zeros() -> Body:
    x = torch.rand(8, device="cuda")
    return lambda: (x.new_zeros(3), x.new_full((2,), 1.5), torch.ones_like(x))


@snippet(1, COPY, thread("huggingface/diffusers", 13406, "frequencies moved in each forward"))
def constant_moved_in_each_forward() -> Body:
    frequencies, x = torch.linspace(1, 2, _LARGE), torch.rand(_LARGE, device="cuda")
    return lambda: x * frequencies.to(x.device)


@snippet(0, SAME_DEVICE, repairs=constant_moved_in_each_forward)
def constant_registered() -> Body:
    module = nn.Module()
    module.register_buffer("frequencies", torch.linspace(1, 2, _LARGE))
    module.cuda()
    x = torch.rand(_LARGE, device="cuda")
    return lambda: x * module.get_buffer("frequencies").to(x.device)


@snippet(2, COPY)
def module_moved() -> Body:
    module = nn.Linear(8, 8)
    return lambda: module.cuda()


@snippet(0, SAME_DEVICE)
def module_moved_again() -> Body:
    module = nn.Linear(8, 8).cuda()
    return lambda: module.to("cuda")


@snippet(1, COPY, SAME_DEVICE)
def moved_twice() -> Body:
    x = torch.randn(_LARGE)
    return lambda: x.to("cuda").to("cuda")


@snippet(0, SAME_DEVICE)
def moved_to_its_own_device() -> Body:
    x = torch.rand(8, device="cuda")
    return lambda: (x.to(x.device), x.cuda(), x.to(torch.float32))


@snippet(0, ON_DEVICE)
def type_changed_on_the_device() -> Body:
    x = torch.rand(8, device="cuda")
    return lambda: (x.half(), x.to(torch.bfloat16), x.double(), x.int())


@snippet(0, HOST_SCALAR)
def host_scalar_as_operand() -> Body:
    x, scale = torch.rand(8, device="cuda"), torch.tensor(2.0)
    return lambda: (x * scale, x + torch.tensor(1.0), x.clamp(min=0.1), x.pow(2), 3.0 - x)


@snippet(0, RANDOM)
def random_on_the_device() -> Body:
    x = torch.rand(8, device="cuda")
    return lambda: (torch.randn(8, device="cuda"), torch.rand_like(x), x.bernoulli(), x.normal_())


@snippet(1, aten("cuda/DistributionTemplates.h", 662, "p.to(device), blocking"))
def bernoulli_of_the_host() -> Body:
    x, p = torch.empty(8, device="cuda"), torch.full((8,), 0.5)
    return lambda: x.bernoulli_(p)


@snippet(0, FILL)
def scalar_tensor() -> Body:
    return lambda: torch.scalar_tensor(2.0, device="cuda")


@snippet(0, FILL)
def nothing_moved() -> Body:
    x = torch.empty(0)
    return lambda: x.to("cuda")


def _loader(*, pin_memory: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    data = TensorDataset(torch.randn(8, _LARGE // 8), torch.arange(8))
    return DataLoader(data, batch_size=4, pin_memory=pin_memory)


@snippet(4, COPY)
def loader_without_pinning() -> Body:
    loader = _loader(pin_memory=False)
    return lambda: [(x.cuda(), y.cuda()) for x, y in loader]


@snippet(0, QUEUED, repairs=loader_without_pinning)
def loader_with_pinning() -> Body:
    loader = _loader(pin_memory=True)
    return lambda: [
        (x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)) for x, y in loader
    ]


@snippet(4, COPY)
def loader_pinned_but_blocking() -> Body:
    loader = _loader(pin_memory=True)
    return lambda: [(x.cuda(), y.cuda()) for x, y in loader]


@snippet(0, ELEMENTWISE, repairs=array_as_tensor)
def array_moved_ahead() -> Body:
    x = torch.as_tensor(np.ones(8, dtype=np.float32), device="cuda")
    return lambda: x + 1
