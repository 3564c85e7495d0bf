from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from models import OPTIMIZERS, SAMPLES, Sample, train
from observe.loops import TESTS
from torchtrim.observe.places import Places
from torchtrim.observe.recorder import Recorder


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
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


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
