from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

from torchtrim.emulator import Emulation

pytestmark = pytest.mark.usefixtures("device")

PLACES: list[tuple[Any, str]] = [
    (None, "cuda"),
    ("cuda", "cuda"),
    ("cuda:0", "cuda"),
    ("cpu", "cpu"),
    (torch.device("cuda", 0), "cuda"),
    (torch.device("cpu"), "cpu"),
    ({"cuda:0": "cpu"}, "cpu"),
    ({"cuda:1": "cpu"}, "cuda"),
    (lambda storage, place: storage, "cpu"),
    (lambda storage, place: storage.cuda(), "cuda"),
    (lambda storage, place: storage.cuda(0), "cuda"),
]


def saved(thing: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(thing, file, **options)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(("where", "expected"), PLACES)
def test_files_say_where_tensors_were(where: Any, expected: str, weights_only: bool) -> None:
    x = torch.randn(3, device="cuda")
    loaded = torch.load(saved({"x": x}), map_location=where, weights_only=weights_only)["x"]
    assert loaded.device.type == expected
    assert torch.equal(loaded.cpu(), x.cpu())


def test_files_of_the_host_and_of_older_torch() -> None:
    assert torch.load(saved(torch.ones(2))).is_cpu
    assert torch.load(saved(torch.ones(2)), map_location="cuda").is_cuda
    older = saved(torch.ones(2, device="cuda"), _use_new_zipfile_serialization=False)
    assert torch.load(older).is_cuda


def test_a_file_of_the_device_is_loaded_without_one(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).cuda().state_dict(), tmp_path / "model.pt")
    model = nn.Linear(2, 2)
    model.load_state_dict(torch.load(tmp_path / "model.pt", map_location="cpu", mmap=True))
    assert model.weight.is_cpu


def test_optimizer_state_follows_its_parameters() -> None:
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    state = torch.load(saved(optimizer.state_dict()), map_location="cpu")
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(state)
    found = other.state[model.weight]
    assert found["exp_avg"].is_cuda
    assert found["step"].is_cpu


def test_optimizers_take_lists_by_default_as_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cuda()
    groups = torch.optim.Optimizer._group_tensors_by_device_and_dtype([list(model.parameters())])
    ((place, dtype),) = groups
    assert str(place) == "cuda:0"
    assert dtype == torch.float32
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.dim() == 0


def test_average_models() -> None:
    model = nn.Linear(2, 2).cuda()
    average = swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert average.module.weight.is_cuda


def test_compiling_is_left_out_and_said(device: Emulation) -> None:
    model = nn.Linear(2, 2).cuda()
    assert torch.compile(model) is model
    assert torch.compile(mode="reduce-overhead")(len) is len
    model.compile()
    assert len(device.notes) == 2
    assert all("was ignored" in note for note in device.notes)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_and_traces_run() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).cuda()
    x = torch.randn(2, 3, device="cuda")
    traced = torch.jit.trace(model, x)
    scripted = torch.jit.script(model)
    assert traced(x).is_cuda
    assert torch.equal(scripted(x), model(x))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file, map_location="cuda")
    assert all(parameter.is_cuda for parameter in loaded.parameters())
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("options", [{}, {"device_ids": [0]}])
def test_data_parallel_of_one_device(options: dict[str, Any]) -> None:
    model = nn.DataParallel(nn.Linear(3, 3), **options).cuda()
    host = torch.randn(4, 3)
    y = model(host)
    y.sum().backward()
    assert y.is_cuda
    assert torch.equal(y, model.module(host.cuda()))


def test_distributed_data_parallel_of_one_process(tmp_path: Path) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(0)
        model = nn.parallel.DistributedDataParallel(
            nn.SyncBatchNorm.convert_sync_batchnorm(plain), device_ids=[0]
        )
        y = model(torch.randn(4, 3, device="cuda"))
        y.sum().backward()
        total = torch.ones(3, device="cuda")
        dist.all_reduce(total)
    finally:
        dist.destroy_process_group()
    assert y.is_cuda
    assert total.is_cuda
    assert all(p.grad is not None and p.grad.is_cuda for p in plain.parameters())


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_pin(workers: int) -> None:
    data = TensorDataset(torch.randn(8, 3), torch.arange(8))
    loader = DataLoader(data, 4, pin_memory=True, num_workers=workers)
    rows = []
    for x, y in loader:
        assert x.is_pinned()
        assert y.is_pinned()
        rows.append(x.to("cuda", non_blocking=True))
    assert torch.equal(torch.cat(rows).cpu(), data.tensors[0])


def test_loaders_of_a_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        data = TensorDataset(torch.randn(8, 3), torch.arange(8))
        generator = torch.Generator("cuda").manual_seed(2)
        batches = list(DataLoader(data, 4, shuffle=True, generator=generator))
    finally:
        torch.set_default_device(None)
    assert all(tensor.is_cuda for batch in batches for tensor in batch)


class Own:
    """A batch that pins itself."""

    pinned = False

    def pin_memory(self) -> Own:
        self.pinned = True
        return self


def test_batches_of_ones_own_pin_themselves() -> None:
    collate: Callable[[Any], Own] = lambda batch: Own()  # noqa: E731
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), 2, pin_memory=True, collate_fn=collate)
    assert all(batch.pinned for batch in loader)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_profiler_that_wants_the_device() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        torch.ones(3, device="cuda").mul_(2)
    assert "aten::mul_" in profiler.key_averages().table(sort_by="cuda_time_total")
