from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchtrim import Unsupported
from torchtrim.emulator import emulate
from torchtrim.emulator.runtime import DEFAULT, MODELS

MIB = 2**20
ON_DEVICE = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("name", MODELS)
def test_a_device_is_as_its_model_says(name: str) -> None:
    model = MODELS[name]
    with emulate(model):
        properties = torch.cuda.get_device_properties(0)
        assert properties.total_memory == model.memory_bytes == torch.cuda.mem_get_info()[1]
        assert properties.multi_processor_count == model.processors
        assert torch.cuda.get_device_capability() == (model.major, model.minor)
        assert model.name in torch.cuda.get_device_name()


@ON_DEVICE
def test_there_is_a_device() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.is_initialized()
    assert torch.cuda.is_bf16_supported()
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.version.cuda is not None
    assert torch.backends.cudnn.is_available()


@ON_DEVICE
def test_properties_are_the_models() -> None:
    properties: Any = torch.cuda.get_device_properties(0)
    assert properties.total_memory == DEFAULT.memory_bytes
    assert properties.name == torch.cuda.get_device_name("cuda:0")
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.mem_get_info() == (DEFAULT.memory_bytes, DEFAULT.memory_bytes)


@ON_DEVICE
def test_choosing_the_device() -> None:
    torch.cuda.set_device(0)
    torch.cuda.set_device("cuda:0")
    torch.cuda.set_device(torch.device("cuda", 0))
    for chosen in (0, "cuda:0", torch.device("cuda"), None):
        with torch.cuda.device(chosen):
            assert torch.ones(1, device="cuda").is_cuda
    with torch.cuda.device_of(torch.ones(1)), torch.accelerator.device_index(0):
        pass
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(1)
    assert torch.cuda._utils._get_device_index("cuda:0") == 0


@ON_DEVICE
def test_memory_is_counted_as_the_caching_allocator_does() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.ones(1000, device="cuda")
    y = torch.ones(1, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096 + 512
    assert torch.cuda.memory_reserved() == 2 * MIB
    del y
    assert torch.cuda.memory_allocated() - before == 4096
    assert torch.cuda.max_memory_allocated() - before == 4096 + 512
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() - before == 4096
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.mem_get_info()[0] == DEFAULT.memory_bytes


@ON_DEVICE
def test_the_host_and_views_do_not_count() -> None:
    x = torch.ones(1000, device="cuda")
    before = torch.cuda.memory_allocated()
    held = [x[1:], x.view(10, 100), x.t(), x.detach(), x.cpu(), torch.ones(1000)]
    assert torch.cuda.memory_allocated() == before
    held.append(x.cpu().cuda())
    assert torch.cuda.memory_allocated() == before + 4096


@ON_DEVICE
def test_statistics() -> None:
    x = torch.ones(1000, device="cuda")
    statistics = torch.cuda.memory_stats()
    assert statistics["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    assert statistics["reserved_bytes.all.current"] == torch.cuda.memory_reserved()
    assert statistics["allocation.all.current"] == 1
    assert statistics["segment.all.current"] == 1
    assert statistics["inactive_split_bytes.all.current"] == 2 * MIB - 4096
    assert statistics["num_alloc_retries"] == statistics["num_ooms"] == 0
    assert "allocated_bytes" in torch.cuda.memory_summary()
    assert torch.accelerator.memory_allocated() == 4096
    del x


@ON_DEVICE
def test_what_does_nothing() -> None:
    cuda: Any = torch.cuda
    for name in ("init", "ipc_collect", "reset_accumulated_memory_stats", "memory_snapshot"):
        getattr(cuda, name)()
    cuda.memory._record_memory_history(max_entries=10)
    cuda.memory._dump_snapshot("nowhere.pickle")
    cuda.set_per_process_memory_fraction(0.5)
    cuda.nvtx.range_push("a")
    cuda.nvtx.range_pop()
    with cuda.nvtx.range("b"), cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx():
        pass
    assert cuda.cudart().cudaProfilerStart() == 0
    assert cuda.utilization() == cuda.temperature() == cuda.memory_usage() == 0
    assert nn.LSTM(2, 2).cuda().flatten_parameters() is None  # type: ignore[func-returns-value]


@ON_DEVICE
def test_random_states() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.randn(3, device="cuda"))
    states = torch.cuda.get_rng_state_all()
    torch.cuda.set_rng_state_all(states)
    for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.manual_seed):
        seed(3)
        first = torch.rand(2, device="cuda")
        seed(3)
        assert torch.equal(first, torch.rand(2, device="cuda"))
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[0]):
        torch.randn(3, device="cuda")
    assert torch.equal(before, torch.get_rng_state())


@ON_DEVICE
def test_a_sync_debug_mode_is_kept() -> None:
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    torch.cuda.set_sync_debug_mode(0)


@ON_DEVICE
@pytest.mark.parametrize("name", ["CUDAGraph", "graph", "make_graphed_callables"])
def test_graphs_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=f"torch.cuda.{name} captures device work"):
        getattr(torch.cuda, name)(None)


@ON_DEVICE
def test_arguments_have_the_names_that_torch_gives_them() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(stream=side):
        assert torch.cuda.current_stream() == side
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(new_state=state, device=0)
    torch.cuda.set_sync_debug_mode(debug_mode="warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    torch.cuda.set_sync_debug_mode(debug_mode=0)
    with pytest.raises(TypeError):
        torch.cuda.set_rng_state(values=state)
