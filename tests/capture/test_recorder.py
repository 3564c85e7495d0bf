from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

from capture.loops import TESTS, record
from models import OPTIMIZERS, SAMPLES, Sample, train
from torchtrim.capture.recorder import Recorder
from torchtrim.dispatch.places import Places

CPU = torch.device("cpu")


def tensors_of(sample: Sample, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    yield from (sample.inputs, sample.targets)
    yield from sample.model.parameters()
    yield from sample.model.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def recorded_peak(sample: Sample, optimizer: torch.optim.Optimizer) -> int:
    recorder = Recorder(Places(TESTS))
    recorder.track(tensors_of(sample, optimizer))
    recorder.start(scan=False)
    train(sample, optimizer)
    recorder.stop()
    return recorder.storages.peak_bytes


def reference_peak(sample: Sample, optimizer: torch.optim.Optimizer) -> int:
    tracker = MemTracker()
    tracker.track_external(sample.model, optimizer, sample.inputs, sample.targets)
    with tracker:
        train(sample, optimizer)
    return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what is dispatched, as MemTracker does: not the states that a checkpoint keeps."""
    monkeypatch.setattr(Recorder, "_watch_states", lambda _: None)


@pytest.mark.usefixtures("dispatched")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_the_tracked_peak_is_mem_trackers(
    make: Callable[[], Sample], make_optimizer: Callable[[Any], Any], warm: bool
) -> None:
    peaks = []
    for peak in (recorded_peak, reference_peak):
        torch.manual_seed(0)
        sample = make()
        optimizer = make_optimizer(sample.model.parameters())
        train(sample, optimizer, steps=int(warm))
        peaks.append(peak(sample, optimizer))
    assert peaks[0] == peaks[1]


@pytest.mark.usefixtures("dispatched")
@pytest.mark.parametrize("name", SAMPLES)
def test_watching_modules_and_optimizers_keeps_nothing_alive(name: str) -> None:
    """The peak of a whole recording, modules and all, is MemTracker's too."""
    sample = SAMPLES[name]()
    optimizer = OPTIMIZERS["adam foreach"](sample.model.parameters())

    def loop() -> None:
        train(sample, optimizer)
        train(sample, optimizer)

    profile = record(loop)
    assert profile.tracked_peak_bytes == reference_peak(sample, optimizer)


def test_a_storage_that_is_emptied_and_filled_is_followed() -> None:
    def step(weight: torch.Tensor) -> None:
        total = weight.sum() + weight.cos().sum()
        weight.untyped_storage().resize_(0)
        del total
        other = torch.ones(50)
        weight.untyped_storage().resize_(400)
        weight.fill_(1)
        weight.exp_().add_(other.sum())

    recorder, tracker = Recorder(Places(TESTS)), MemTracker()
    for mode in (recorder, tracker):
        weight = torch.ones(100)
        if mode is tracker:
            tracker.track_external(weight)
            with tracker:
                step(weight)
        else:
            recorder.track([weight])
            recorder.start(scan=False)
            step(weight)
            recorder.stop()
    assert recorder.storages.peak_bytes == tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert [life.bytes for life in recorder.storages.lives].count(400) >= 2
    assert torch.UntypedStorage.resize_ is torch._C.StorageBase.resize_


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A recorder that runs."""
    recorder = Recorder(Places(TESTS))
    recorder.start(scan=False)
    yield recorder
    recorder.stop()


def names(recorder: Recorder) -> list[str]:
    return [op.func.name() for op in recorder.operators]


def test_an_operator_that_raises_is_told_and_not_recorded(recorder: Recorder) -> None:
    recorder.phase = "forward"
    with pytest.raises(RuntimeError, match="size"):
        torch.ones(2, 3) @ torch.ones(4, dtype=torch.float32)
    with pytest.raises(IndexError):
        torch.ones(3).select(0, 7)
    torch.ones(1).cos()
    recorder.stop()
    assert not any("select" in name for name in names(recorder))
    failure = recorder.failure
    assert failure is not None
    assert failure.operator == "aten.select.int"
    assert failure.shapes == "float32[3]"
    assert failure.phase == "forward"
    assert failure.spot is not None
    assert failure.spot[0].co_filename == __file__


def test_nothing_is_left_on_after_an_exception_or_a_second_stop(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(4)
    recorder.stop()
    recorder.stop()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not is_in_torch_dispatch_mode()
    count = len(recorder.operators)
    torch.ones(2)
    assert len(recorder.operators) == count


def test_other_threads_are_not_recorded(recorder: Recorder) -> None:
    thread = threading.Thread(target=lambda: torch.ones(3).cos())
    thread.start()
    thread.join()
    assert "aten::cos" not in names(recorder)


def test_a_forked_process_is_not_recorded(recorder: Recorder) -> None:
    before = len(recorder.operators)
    child = os.fork()
    if not child:
        torch.ones(3).cos()
        os._exit(len(recorder.operators) - before)
    assert os.waitpid(child, 0)[1] == 0


def test_the_device_whose_bytes_are_counted() -> None:
    recorder = Recorder(Places(TESTS), device="cuda:0")
    recorder.start(scan=False)
    kept = torch.ones(100)
    recorder.stop()
    assert recorder.storages.peak_bytes == 0
    assert [life.bytes for life in recorder.storages.lives] == [kept.nbytes]


def test_what_torch_lifts_is_born_there(recorder: Recorder) -> None:
    torch.ones(1)
    kept = torch.tensor([1.0, 2.0])
    life = recorder.storages.lives[recorder.storages.number(kept)]
    assert (life.birth, life.kind) == (1, "")


def test_recording_does_not_import_dynamo() -> None:
    code = (
        "import sys, torch\n"
        "from torchtrim.dispatch.places import Places\n"
        "from torchtrim.capture.recorder import Recorder\n"
        "recorder = Recorder(Places('/'))\n"
        "recorder.start(); torch.ones(3).cos(); recorder.stop()\n"
        "sys.exit('torch._dynamo' in sys.modules or len(recorder.operators) != 2)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_generator_states_that_a_checkpoint_keeps_are_counted() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    size = torch.get_rng_state().nbytes
    before = torch.get_rng_state
    recorder = Recorder(Places(TESTS))
    recorder.start(scan=False)
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False)
    kept = [life for life in recorder.storages.lives if life.bytes == size]
    assert len(kept) == 2
    assert all(life.death < 0 for life in kept)
    y.sum().backward()
    torch.get_rng_state()
    recorder.stop()
    assert all(life.birth < life.death <= len(recorder.operators) for life in kept)
    assert recorder.storages.live_bytes < recorder.storages.peak_bytes
    assert torch.get_rng_state is before is torch.random.get_rng_state
