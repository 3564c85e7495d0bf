"""Tensors that are shared out over ranks, on an emulated device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtrim.emulator import emulate


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with emulate():
            yield init_device_mesh("cuda", (2,))
    finally:
        dist.destroy_process_group()


def test_a_sharded_tensor_is_where_its_parts_are(mesh: DeviceMesh) -> None:
    local = torch.rand(4, 4, device="cuda")
    whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    assert whole.device == torch.device("cuda", 0)
    assert whole.is_cuda
    assert torch.nn.Parameter(whole).device.type == "cuda"
    elsewhere = DTensor.from_local(torch.rand(4, 4), mesh, [Shard(0)], run_check=False)
    assert isinstance(elsewhere, DTensor)


def test_an_exchange_that_is_awaited_later_goes_through_autograd(mesh: DeviceMesh) -> None:
    local = torch.rand(4, 4, device="cuda", requires_grad=True)
    awaited = AsyncCollectiveTensor(local.detach())
    assert awaited.device == torch.device("cuda", 0)
    whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    gathered = whole.redistribute(placements=[Replicate()], async_op=True)
    gathered.to_local().sum().backward()
    assert local.grad is not None


def test_fake_tensors_of_the_device_are_drawn_and_copied() -> None:
    with emulate(), FakeTensorMode():
        drawn = torch.empty(2, 2, device="cuda").uniform_(0, 1)
        assert drawn.copy_(torch.empty(2, 2, device="cuda")).shape == (2, 2)
