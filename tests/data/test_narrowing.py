from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torchtrim import UsageError
from torchtrim.data import Prefetcher, narrow
from torchtrim.data.narrowing import Shipped
from torchtrim.data.parts import narrowed, narrowest, packed_in
from torchtrim.emulator import emulate

LEVELS = torch.arange(256, dtype=torch.uint8)
CASES: dict[str, tuple[Tensor, torch.dtype]] = {
    "whole floats": (LEVELS.float(), torch.uint8),
    "as ToTensor makes them": (LEVELS.float().div(255), torch.uint8),
    "in double": (LEVELS.double().div(255), torch.uint8),
    "normalized": ((LEVELS.float().div(255) - 0.45) / 0.225, torch.float32),
    "halves": (torch.linspace(-4, 4, 99).half().float(), torch.float16),
    "brains": (torch.linspace(-1e30, 1e30, 99).bfloat16().float(), torch.bfloat16),
    "singles in double": (torch.rand(99).mul(1e-20).double(), torch.float32),
    "doubles": (torch.rand(99, dtype=torch.float64), torch.float64),
    "labels": (torch.arange(10), torch.uint8),
    "signed": (torch.arange(-10, 10), torch.int8),
    "tokens": (torch.arange(0, 50_000, 7), torch.int32),
    "large": (torch.tensor([2**40]), torch.int64),
    "bytes": (LEVELS, torch.uint8),
    "booleans": (torch.tensor([True]), torch.bool),
    "complex": (torch.ones(3, dtype=torch.complex64), torch.complex64),
    "none": (torch.empty(0), torch.float32),
    "negative zero": (torch.tensor([0.0, -0.0]), torch.float16),
    "not a number": (torch.tensor([1.0, float("nan")]), torch.float32),
    "infinite": (torch.tensor([1.0, float("inf")]), torch.float16),
    "one that is not": (torch.cat([torch.zeros(5000), torch.tensor([0.1])]), torch.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_the_narrowest_type_gives_every_bit_back(name: str) -> None:
    tensor, kind = CASES[name]
    assert narrowest(tensor) == kind
    packed = packed_in(tensor)
    assert (packed is None) == (kind == tensor.dtype)
    if packed is not None:
        wide = packed.widened()
        assert wide.dtype == tensor.dtype
        assert wide.numpy().tobytes() == tensor.numpy().tobytes()


def test_the_bytes_of_a_batch() -> None:
    batch = {"image": torch.ones(4, 8), "more": [torch.rand(4, dtype=torch.float64), "name"]}
    found = narrowed(batch)
    assert (found.bytes, found.narrow_bytes) == (4 * 8 * 4 + 32, 4 * 8 + 32)
    assert found.types == ("float32 -> uint8",)


def images() -> TensorDataset:
    torch.manual_seed(0)
    levels = torch.randint(256, (24, 3, 48, 48), dtype=torch.uint8)
    return TensorDataset(levels.float().div(255), torch.arange(24))


def plain(*, pinned: bool = False) -> DataLoader[Any]:
    return DataLoader(images(), batch_size=8, pin_memory=pinned)


@pytest.mark.parametrize("order", ["", "early", "late"])
@pytest.mark.parametrize("prefetched", [False, True])
def test_batches_are_the_same_on_the_device(order: str, prefetched: bool) -> None:
    wanted = list(plain())
    with emulate(streams=order):
        loader = narrow(plain(pinned=True))
        batches = Prefetcher(loader, "cuda", 2) if prefetched else loader
        for (x, y), (image, label) in zip(batches, wanted, strict=True):
            moved = x if prefetched else x.to("cuda", non_blocking=True)
            assert moved.dtype == torch.float32
            assert torch.equal(moved.cpu(), image)
            assert torch.equal(y.cpu(), label)


def test_what_is_shipped_is_a_quarter() -> None:
    image, label = next(iter(narrow(DataLoader(images(), batch_size=8))))
    assert isinstance(image, Shipped)
    assert isinstance(label, Tensor)
    assert image.packed.values.dtype == torch.uint8
    assert (image.shape, image.dtype, image.size(0), len(image)) == (
        torch.Size((8, 3, 48, 48)),
        torch.float32,
        8,
        8,
    )
    assert image.to(torch.float64).dtype == image.to("cpu", torch.float64).dtype == torch.float64
    assert torch.equal(image.cpu(), image.to("cpu"))
    assert torch.equal(image.to(dtype=torch.float32), image.cpu())


def test_what_does_not_come_back_is_shipped_as_it_is() -> None:
    rows = TensorDataset(torch.rand(24, 3, 48, 48))
    (image,) = next(iter(narrow(DataLoader(rows, batch_size=8))))
    assert isinstance(image, Tensor)


def test_only_a_loader_is_narrowed() -> None:
    with pytest.raises(UsageError, match=r"expected a DataLoader, got"):
        narrow([1, 2])  # type: ignore[arg-type]
