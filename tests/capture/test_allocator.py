from __future__ import annotations

import contextlib
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler as autograd_profiler
from torch.autograd import profiler_legacy
from torch.autograd.profiler import record_function
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from capture.loops import record
from models import OPTIMIZERS, SAMPLES, Sample, train
from torchtrim.capture import allocator
from torchtrim.capture.allocator import (
    NOTHING,
    CpuAllocator,
    CudaAllocator,
    Freed,
    _Block,
    _of_the_script,
    _rises,
    _unreported,
    _without_numbers,
    allocator_for,
    rss_bytes,
)
from torchtrim.capture.recording import record_call
from torchtrim.dispatch.profilers import made, open_ranges, waits_to_start
from torchtrim.dryrun.run import dry_run


def memory_profiler() -> Any:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False)


def rise(profiled: Any) -> int:
    """The highest sum of the profiler's memory events."""
    events = profiled.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(sizes, key=lambda pair: pair[0])))


def alive_bytes(sample: Sample, optimizer: torch.optim.Optimizer) -> int:
    tensors = [*sample.model.parameters(), *sample.model.buffers(), sample.inputs, sample.targets]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def measured_peak(sample: Sample, optimizer: torch.optim.Optimizer) -> int:
    """The peak of a step, by another use of torch's profiler."""
    train(sample, optimizer)
    with memory_profiler():
        train(sample, optimizer)
    gc.collect()
    before = alive_bytes(sample, optimizer)
    with memory_profiler() as profiled:
        train(sample, optimizer)
    return before + rise(profiled)


@pytest.mark.parametrize("name", ["lstm", "unet", "resnet", "groupnorm", "encoder"])
def test_the_peak_is_the_allocators(name: str) -> None:
    sample = SAMPLES[name]()
    optimizer = OPTIMIZERS["adam foreach"](sample.model.parameters())
    expected = measured_peak(sample, optimizer)
    found = record(lambda: train(sample, optimizer, steps=3), allocator=CpuAllocator())
    assert found.peak_bytes == pytest.approx(expected, rel=0.01)
    assert found.peak_bytes >= found.tracked_peak_bytes


def test_scratch_inside_of_kernels_is_seen_where_it_is_used() -> None:
    sample = SAMPLES["lstm"]()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)
    found = record(lambda: train(sample, optimizer, steps=3), allocator=CpuAllocator())
    assert found.peak_bytes > 1.1 * found.tracked_peak_bytes
    made = [
        sum(s.bytes for s in {found.storages[use.storage] for use in op.outputs} if s.birth == i)
        for i, op in enumerate(found.operators)
    ]
    assert all(op.transient_bytes >= size for op, size in zip(found.operators, made, strict=True))
    scratch = {
        op.name: op.transient_bytes - size for op, size in zip(found.operators, made, strict=True)
    }
    assert max(scratch, key=lambda name: scratch[name]).startswith("aten::mkldnn_rnn_layer")


def test_operators_that_raise_do_not_shift_the_others() -> None:
    sample = SAMPLES["lstm"]()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(2):
            loss = sample.loss()
            with pytest.raises(RuntimeError):
                torch.ones(2, 3) @ torch.ones(4)
            loss.backward()
            optimizer.step()

    found = record(loop, allocator=CpuAllocator())
    (backward, *_) = [op for op in found.operators if "mkldnn_rnn_layer_backward" in op.name]
    assert backward.transient_bytes > 1000
    assert sum(op.transient_bytes > 0 for op in found.operators) > 20


def of_the_script(
    blocks: list[tuple[int, int, int]],
    own: list[tuple[int, int]],
    live: dict[int, int] | None = None,
) -> list[tuple[int, int]]:
    return _of_the_script([_Block(*one) for one in blocks], own, {} if live is None else live)


class TestPureParts:
    def test_how_far_memory_rises_inside_of_marks(self) -> None:
        memory = [(1, 5), (3, 10), (4, 20), (5, -10), (8, 7), (9, -7), (20, 3)]
        assert _rises(memory, [(2, 6), (7, 10), (12, 15), (19, 21)]) == [30, 7, 0, 3]

    def test_blocks_that_nobody_reported_end_at_the_mark_where_they_died(self) -> None:
        blocks = [_Block(2, -4, 1), _Block(3, 8, 2), _Block(6, 5, 3)]
        marks = [(1, 2), (5, 7)]
        freed = [Freed(address, 4, 1) for address in (1, 2, 3, 4)]
        found = list(_unreported(blocks, marks, {3: 4}, [*freed, Freed(5, 4, 2)]))
        assert found == [_Block(5, -4, 2), _Block(5, -4, 4)]

    def test_blocks_of_our_own_do_not_count_wherever_they_are_freed(self) -> None:
        blocks = [(1, 5, 0), (3, 10, 1), (4, -10, 1), (8, 7, 2), (10, 1, 3)]
        assert of_the_script(blocks, [(2, 5), (10, 11)]) == [(1, 5), (8, 7)]
        assert of_the_script(blocks, []) == [block[:2] for block in blocks]
        collected = [(1, 64, 0), (3, 8, 1), (4, -64, 0), (5, -8, 1), (6, 16, 0), (7, 9, 1)]
        assert of_the_script(collected, [(2, 5)]) == [(1, 64), (4, -64), (6, 16), (7, 9)]
        assert of_the_script([(3, 8, 1), (9, -8, 1)], [(2, 5)]) == []

    def test_a_free_that_nobody_reported_is_seen_when_the_address_is_used_again(self) -> None:
        live: dict[int, int] = {}
        assert of_the_script([(1, 64, 0), (2, 32, 1)], [], live) == [(1, 64), (2, 32)]
        assert of_the_script([(5, 48, 0), (6, -32, 1)], [], live) == [(5, -64), (5, 48), (6, -32)]
        assert live == {0: 48}

    def test_the_allocator_of_a_device(self) -> None:
        assert isinstance(allocator_for("cpu"), CpuAllocator)
        assert isinstance(allocator_for("emulated"), CudaAllocator)
        assert isinstance(allocator_for("cuda:0"), CudaAllocator)

    def test_resident_memory(self) -> None:
        found = rss_bytes()
        assert found is None or found > 1 << 20


class TestCuda:
    @pytest.fixture(autouse=True)
    def pretended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counters = {
            "memory_allocated": 100,
            "max_memory_allocated": 170,
            "max_memory_reserved": 512,
        }
        for name, value in counters.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda device: None)

    def test_the_caching_allocators_counters(self) -> None:
        watching = CudaAllocator()
        watching.start()
        watched = watching.stop()
        assert (watched.peak, watched.end, watched.reserved, watched.before) == (70, 0, 512, 100)
        assert not watched.transients


IDLE: dict[str, Callable[[], Any]] = {
    "switched off": lambda: autograd_profiler.profile(enabled=False),
    "switched off, with kineto": lambda: autograd_profiler.profile(enabled=False, use_kineto=True),
    "waits": lambda: profile(schedule=schedule(wait=9, warmup=1, active=1)),
    "does nothing": lambda: profile(schedule=lambda _: ProfilerAction.NONE),
    "emit_nvtx": lambda: autograd_profiler.emit_nvtx(enabled=False),
    "emit_itt": lambda: autograd_profiler.emit_itt(enabled=False),
    "a range": lambda: record_function("theirs"),
    "not entered": lambda: [profile(), autograd_profiler.profile()],
    "not entered and switched off": lambda: [autograd_profiler.profile(enabled=False)],
    "ended": lambda: [ended()],
}


def ended() -> Any:
    with autograd_profiler.profile() as theirs:
        torch.ones(1)
    return theirs


class TestTheScriptsOwnProfiler:
    """There is one profiler in a process, and the script's comes first."""

    @pytest.fixture
    def watching(self) -> Iterator[CpuAllocator]:
        watching = CpuAllocator()
        yield watching
        watching.stop()

    def names(self, profiled: Any) -> list[str]:
        return [event.name() for event in profiled.profiler.kineto_results.events()]

    def test_one_that_runs_is_not_disturbed(self, watching: CpuAllocator) -> None:
        with memory_profiler() as theirs:
            watching.start()
            torch.ones(3).cos()
            assert watching.stop() is NOTHING
            torch.ones(3).sin()
        assert {"aten::cos", "aten::sin"} <= set(self.names(theirs))

    def test_to_one_that_starts_we_give_way(self, watching: CpuAllocator) -> None:
        watching.start()
        torch.ones(3).cos()
        with memory_profiler() as theirs:
            torch.ones(3).sin()
            assert watching.stop() is NOTHING
            torch.ones(3).tan()
        assert {"aten::sin", "aten::tan"} <= set(self.names(theirs))

    def test_one_that_has_warmed_up_is_not_disturbed(self, watching: CpuAllocator) -> None:
        def handled(theirs: Any) -> None:
            found.extend(self.names(theirs))

        found: list[str] = []
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=1, repeat=1),
            on_trace_ready=handled,
            acc_events=True,
        ) as theirs:
            for _ in range(4):
                watching.start()
                torch.ones(3).cos()
                watching.stop()
                theirs.step()
        assert "aten::cos" in found

    def test_the_old_way_to_profile(self, watching: CpuAllocator) -> None:
        watching.start()
        with torch.autograd.profiler.profile() as theirs:
            torch.ones(3).sin()
        assert "aten::sin" in [event.name for event in theirs.function_events]
        assert watching.stop() is NOTHING

    @pytest.mark.parametrize("name", IDLE)
    def test_one_that_never_starts_is_in_nobodys_way(
        self, watching: CpuAllocator, name: str
    ) -> None:
        theirs = IDLE[name]()
        with theirs if hasattr(type(theirs), "__enter__") else contextlib.nullcontext():
            watching.start()
            made = torch.ones(1000)
            assert watching.stop().end == made.nbytes

    def test_one_that_was_not_constructed_is_in_nobodys_way(self, watching: CpuAllocator) -> None:
        kinds = (profile, autograd_profiler.profile, record_function)
        without_attributes = [kind.__new__(kind) for kind in kinds]
        watching.start()
        made = torch.ones(1000)
        assert watching.stop().end == made.nbytes
        assert not {*map(id, without_attributes)} & {*map(id, open_ranges())}

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_to_the_legacy_one_we_give_way(self, watching: CpuAllocator) -> None:
        for _ in range(2):
            watching.start()
            with profiler_legacy.profile() as theirs:
                torch.ones(3).sin()
                assert watching.stop() is NOTHING
            assert "aten::sin" in [event.name for event in theirs.function_events]

    def test_a_recording_goes_on_without_the_allocator(self) -> None:
        sample = SAMPLES["mlp"]()
        optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)
        with memory_profiler() as theirs:
            found = record(lambda: train(sample, optimizer, steps=3), allocator=CpuAllocator())
        assert found.peak_bytes == found.tracked_peak_bytes
        assert "aten::addmm" in self.names(theirs)

    def test_torchs_functions_are_put_back(self, watching: CpuAllocator) -> None:
        originals = (autograd_profiler._prepare_profiler, autograd_profiler._enable_profiler)
        watching.start()
        assert autograd_profiler._prepare_profiler is not originals[0]
        assert watching.stop().end == 0
        assert (
            autograd_profiler._prepare_profiler,
            autograd_profiler._enable_profiler,
        ) == originals

    def test_ours_says_nothing(self) -> None:
        code = (
            "from torchtrim.capture.allocator import CpuAllocator\n"
            "watching = CpuAllocator()\n"
            "watching.start(); watching.stop(); watching.stop()\n"
        )
        done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_block_from_before_may_be_freed() -> None:
    """The end of a block is told only if its beginning was: so the step before is watched too."""
    watching = allocator.CpuAllocator()
    watching.start()
    kept = torch.ones(1000)
    first = watching.stop()
    watching.start()
    del kept
    second = watching.stop()
    assert (first.peak, first.end, second.peak, second.end) == (4000, 4000, 0, -4000)


def test_a_block_from_before_any_watch_is_freed_where_its_storage_died() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        older = [torch.ones(64, 8) for _ in range(2)]
        for _ in range(2):
            loss = model(torch.ones(64, 8)).square().sum()
            del older[0]
            loss.backward()
            optimizer.step()

    found = record(loop, allocator=CpuAllocator())
    assert found.tracked_peak_bytes <= found.peak_bytes < found.tracked_peak_bytes + 64


def test_evaluation_and_training_share_the_allocator() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(100, 4))

    found = record(loop, allocator=CpuAllocator())
    assert found.peak_bytes > 100 * 4 * 4 * 2


def test_a_range_that_runs_across_a_watch_is_ended_with_it() -> None:
    watching = CpuAllocator()
    for _ in range(3):
        watching.start()
        with record_function("outer"):
            torch.ones(100)
            assert "outer" in [one.name for one in open_ranges()]
            assert watching.stop().peak >= 400
            watching.start()
            torch.ones(1000)
        assert not open_ranges()
        assert watching.stop().peak >= 4000


def test_profilers_and_ranges_are_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original = record_function.__init__
    with record_function("before"):
        end = made.follow()
        assert [one.name for one in open_ranges()] == ["before"]
        try:
            monkeypatch.setattr(gc, "get_referrers", lambda *_: pytest.fail("searched again"))
            made.follow()()
            with record_function("after"):
                assert [one.name for one in open_ranges()] == ["before", "after"]
            assert not waits_to_start()
            with profile(schedule=lambda _: ProfilerAction.WARMUP):
                assert waits_to_start()
        finally:
            end()
    assert record_function.__init__ is original


def test_a_number_that_becomes_a_tensor_counts_once() -> None:
    """Events as (moment, size); the operator's own range lasts from 10 to 20."""
    twice = [(9, 8), (11, 8), (12, 400), (13, -8), (21, -8)]
    assert _without_numbers(twice, [(10, 20)]) == twice[1:-1]
    result_before = [(4, 8), (11, 8), (12, 400), (13, -8), (21, -8)]
    assert _without_numbers(result_before, [(3, 5), (10, 20)]) == result_before
    read = [(9, 8), (12, 400), (21, -8)]
    assert _without_numbers(read, [(10, 20)]) == read


def test_a_sum_of_gradients_is_in_place_as_without_a_recorder() -> None:
    """Branches whose gradients meet: those of `y` are nobody else's, one of `z` is another's as well."""
    x = torch.randn(10_000, requires_grad=True)

    def step() -> None:
        y = x * 2
        z = y.exp() * y.cos() + y.sin()
        (z + z.cos()).sum().backward()
        x.grad = None

    allocator = CpuAllocator()
    allocator.start()
    step()
    rise = allocator.stop().peak
    for dry in (False, True):
        with dry_run(".", owned_only=True) if dry else contextlib.nullcontext():
            profile = record_call(step, device="cpu")
        assert profile.peak_bytes == pytest.approx(x.nbytes + rise, abs=0 if not dry else 64)


ROWS = torch.arange(90)
INTO_ZEROS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda y: y.max(1).values,
    "gather": lambda y: y.gather(1, ROWS.expand(100, 90)),
    "index_select": lambda y: y.index_select(0, ROWS),
    "index": lambda y: y[ROWS],
    "take": lambda y: y.take(ROWS),
    "masked_select": lambda y: y.masked_select(y.detach() > 0),
    "trace": lambda y: y.trace(),
    "cross entropy": lambda y: cross_entropy(y, y.detach().sigmoid()),
}


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", INTO_ZEROS)
def test_a_gradient_is_written_into_its_own_zeros_as_without_a_recorder(
    name: str, twice: bool
) -> None:
    """`twice`: the gradient is differentiated again. Under a dispatch mode such formulas copy."""
    x = torch.randn(100, 100, requires_grad=True)

    def step() -> None:
        loss = (INTO_ZEROS[name](x * 2) ** 2).sum()
        if twice:
            (given,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + given.square().sum()
        loss.backward()
        x.grad = None

    step()
    allocator = CpuAllocator()
    allocator.start()
    step()
    rise = allocator.stop().peak
    profile = record_call(step, device="cpu")
    # A copy has 40,000 bytes; the indices, of which some are made before the step, 800.
    assert profile.peak_bytes == pytest.approx(x.nbytes + rise, abs=1000)
