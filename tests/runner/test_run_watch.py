"""A planned run counts its steps, times them, measures their peak and checks what they assume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from torchtrim.core.isolation import forget
from torchtrim.executor.notices import say
from torchtrim.records.plan import (
    Plan,
    PlanProof,
    Prediction,
    Technique,
    digest_of_techniques,
)
from torchtrim.runner import run_peak
from torchtrim.runner.run_peak import CpuPeak, CudaPeak, PeakMeter, meter_for
from torchtrim.runner.run_report import RunReport, assumption_lines, end_lines, start_lines
from torchtrim.runner.run_watch import RunWatch

OVERWRITE = Technique(name="overwrite", where=("Net.1", "Net.3"))
REPLAY = Technique(name="replay", where=("Net:relu.0",))
MIB = 2**20
HERE = Path("plan.toml")


def plan(*techniques: Technique, inputs: tuple[str, ...] = (), **more: Any) -> Plan:
    proof = PlanProof(
        verdict="BITWISE",
        techniques=digest_of_techniques(techniques),
        steps=5,
        inputs=inputs,
        device="cpu",
    )
    made = Plan(
        torchtrim="0.1.0",
        script="train.py",
        fingerprint={"Net": "1"},
        budget_bytes=50 * MIB,
        techniques=techniques,
        predicted=Prediction(peak_bytes=40 * MIB, step_seconds=0.2, device="cpu"),
        certified=proof if inputs else None,
    )
    return replace(made, **more)


class Loop:
    """A model, its optimizer, and the watch of both."""

    def __init__(self, planned: Plan, *, optimizers: int = 1) -> None:
        self.told: list[str] = []
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.watch = RunWatch(planned, self.told.append)
        self.watch.watch("Net", self.net)
        self.watch.begin(optimizers)

    def step(self, *batches: int) -> None:
        for batch in batches:
            self.net(torch.ones(batch, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(plan(OVERWRITE, inputs=("Net: float32[4, 8]",)))
    yield made
    made.watch.end()


def test_steps_are_counted_with_their_micro_batches_and_the_last_one(loop: Loop) -> None:
    for _ in range(3):
        loop.step(4, 4)
    assert loop.watch.steps == 2
    loop.watch.end()
    assert loop.watch.steps == 3


def test_a_step_that_failed_is_not_counted(loop: Loop) -> None:
    loop.step(4)
    loop.net(torch.ones(4, 8))
    loop.watch.end()
    assert loop.watch.steps == 1


def test_after_the_end_nothing_is_counted(loop: Loop) -> None:
    loop.step(4)
    loop.watch.end()
    for _ in range(3):
        loop.step(2)
    assert (loop.watch.steps, loop.told) == (1, [])


def test_calls_without_gradients_are_no_steps(loop: Loop) -> None:
    loop.step(4)
    with torch.no_grad():
        for _ in range(5):
            loop.net(torch.ones(2, 8))
    loop.step(4)
    loop.watch.end()
    assert (loop.watch.steps, loop.told) == (2, [])


def test_the_first_peak_is_told_beside_a_prediction_for_another_device() -> None:
    class Known(PeakMeter):
        def ends(self, step: int) -> bool:
            self.bytes = 50 * MIB if step > 1 else None
            return False

    predicted = Prediction(peak_bytes=40 * MIB, step_seconds=0.2, device="emulated a100")
    for plans, lines in ((plan(OVERWRITE, predicted=predicted), 1), (plan(OVERWRITE), 0)):
        made = Loop(plans)
        made.watch.peak = Known("")
        for _ in range(4):
            made.step(4)
        made.watch.end()
        told = (
            "step 2 on cpu: peak 50.0 MiB, +25.0% against the 40.0 MiB predicted on emulated a100"
        )
        assert made.told == [told][:lines]


def test_another_batch_is_told_once_and_counted(loop: Loop) -> None:
    for batch in (4, 2, 4, 2, 3):
        loop.step(batch)
    loop.watch.end()
    assert loop.told == ["batch 2 from step 2: certified for 4 only"]
    (held, failed) = assumption_lines(plan(OVERWRITE), loop.watch, verbose=False)
    assert held == "held in every step: Net as planned; nothing else holds overwritten inputs"
    assert failed == (
        "did not hold: batch 2 from step 2: certified for 4 only (in 3 of 5 steps); "
        "batch 3 from step 5: certified for 4 only"
    )


@pytest.mark.parametrize(
    ("certified", "said"),
    [
        (
            ("Net: float32[4, 8]", "Net: float32[6, 8]"),
            "batch 2 from step 1: certified for 4 and 6 only",
        ),
        (
            ("Net: float64[4, 8]",),
            "Net takes float32[2, 8] from step 1: certified for float64[4, 8] only",
        ),
        (
            ("Net: float32[2, 8], autocast to bfloat16",),
            "autocast off from step 1: certified with autocast to bfloat16",
        ),
        (
            ("Other: float32[2, 8]",),
            "Net takes float32[2, 8] from step 1: certified without calls of it",
        ),
    ],
)
def test_inputs_are_compared_with_the_certified_ones(certified: tuple[str, ...], said: str) -> None:
    loop = Loop(plan(OVERWRITE, inputs=certified))
    loop.step(2)
    loop.watch.end()
    assert loop.told == [said]


def test_autocast_that_is_switched_on_is_told(loop: Loop) -> None:
    loop.step(4)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            loop.step(4)
    loop.watch.end()
    assert loop.told == ["autocast to bfloat16 from step 2: certified with autocast off"]
    assert loop.watch.inputs.others[1:] == [
        "autocast to float16 from step 3: certified with autocast off"
    ]
    assert loop.watch.inputs.other_steps == 2


def test_without_a_certificate_or_with_half_of_its_inputs_nothing_is_compared() -> None:
    for planned in (plan(OVERWRITE), plan(OVERWRITE, inputs=("Net: float32[4, 8]",))):
        proof = planned.certified
        if proof is not None:
            proof = PlanProof(
                verdict="BITWISE", techniques="", steps=1, inputs=proof.inputs, complete=False
            )
        loop = Loop(plan(OVERWRITE, certified=proof))
        loop.step(2)
        loop.watch.end()
        assert loop.told == []
        assert "as certified" not in "".join(assumption_lines(planned, loop.watch, verbose=False))


def test_a_technique_that_tells_has_not_held(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    loop.step(4)
    loop.step(4)
    for where in OVERWRITE.where:
        say(where, "its input is kept, so it stays. More.")
    loop.watch.end()
    planned = plan(OVERWRITE, REPLAY)
    held, failed = assumption_lines(planned, loop.watch, verbose=False)
    assert held.endswith(
        "Net as planned; inputs as certified; no hooks on saved tensors; "
        "what is computed from again stays the same until backward"
    )
    assert failed == "did not hold: `Net.1` and 1 more, from step 2: its input is kept"
    assert len([*assumption_lines(planned, loop.watch, verbose=True)]) == 5


def test_a_defect_of_the_watch_ends_it_and_not_the_script(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.delenv("TORCHTRIM_DEBUG", raising=False)
    forget()
    loop.step(4)
    monkeypatch.setattr(loop.watch.inputs, "see", broken)
    for _ in range(3):
        loop.step(4)
    loop.watch.end()
    assert loop.watch.steps == 1
    assert capfd.readouterr().err.count("a defect") == 1
    forget()


def test_among_several_processes_the_third_step_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    meter = CpuPeak()
    for step in (1, 2, 3):
        meter.begins()
        meter.ends(step)
    meter.close()
    assert meter.how == "in step 3"


def test_the_model_keeps_its_class_name_state_and_copies(loop: Loop) -> None:
    loop.step(4)
    assert type(loop.net).__name__ == "Sequential"
    assert isinstance(loop.net, nn.Sequential)
    assert list(loop.net.state_dict()) == ["0.weight", "0.bias"]


def test_the_peak_on_the_cpu_is_the_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a step with a block of 64 MiB is higher by that, and steps around it are not."""
    peaks = []
    monkeypatch.setattr(run_peak, "_SHARE", float("inf"))
    for extra in (8, 64 * MIB):
        meter = CpuPeak()
        for step in (1, 2):
            meter.begins()
            block = torch.empty(extra, dtype=torch.uint8)
            del block
            meter.ends(step)
        meter.close()
        assert meter.bytes is not None
        assert meter.how == "in step 2"
        peaks.append(meter.bytes)
    assert peaks[1] - peaks[0] == pytest.approx(64 * MIB, rel=0.05)


def test_what_a_watched_step_evaluates_is_not_its_peak() -> None:
    meter = CpuPeak()
    for step in (1, 2):
        meter.begins()
        meter.pauses()
        block = torch.empty(512 * MIB, dtype=torch.uint8)
        del block
        assert meter.ends(step)
    meter.close()
    assert meter.bytes is not None
    assert meter.bytes < 512 * MIB


def test_a_run_that_forks_in_each_step_says_why_its_peak_is_not_known() -> None:
    peak = CpuPeak()
    for step in range(1, 5):
        peak.begins()
        peak.forks()
        peak.ends(step)
    assert peak.bytes is None
    assert peak.how.startswith("not measured: the process forked in each watched step, as --verify")
    for step in (5, 6):
        peak.begins()
        peak.ends(step)
    peak.close()
    assert peak.bytes is not None
    assert peak.how == "in step 6"


def test_a_fork_ends_the_profiler_of_a_watched_step() -> None:
    meter = CpuPeak()
    meter.begins()
    meter.ends(1)
    meter.begins()
    child = os.fork()
    if child == 0:
        os._exit(torch._C._autograd._profiler_enabled())
    assert os.waitpid(child, 0)[1] == 0
    assert not torch._C._autograd._profiler_enabled()
    meter.ends(2)
    meter.close()
    assert meter.bytes is None
    assert meter.how.startswith("not measured: the process forked in each watched step")


def test_a_meter_says_nothing_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """Not even torch's warning about blocks that were allocated before."""
    before = [torch.empty(8) for _ in range(50)]
    meter = CpuPeak()
    for step in (1, 2):
        meter.begins()
        before.pop()
        meter.ends(step)
    meter.close()
    assert capfd.readouterr().err == ""


class FakeCuda:
    """The counters of a caching allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.high = 10
        for owner in (torch.cuda, torch.cuda.memory):
            monkeypatch.setattr(owner, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.high)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 2 * self.high)

    def reset(self, *_: object) -> None:
        self.high = 1

    def reach(self, bytes: int) -> None:
        self.high = max(self.high, bytes)


def test_the_peak_on_cuda_is_of_the_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    meter = CudaPeak(torch.device("cuda"), "allocated")
    meter.begins()
    cuda.reach(30)
    meter.pauses()
    cuda.reach(90)  # evaluation
    meter.ends(1)
    meter.begins()
    meter.ends(2)
    assert meter.bytes == 30
    meter.close()
    assert (meter.bytes, meter.how) == (30, "")


def test_a_script_may_reset_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    meter = CudaPeak(torch.device("cuda"), "reserved")
    meter.begins()
    cuda.reach(30)
    torch.cuda.reset_peak_memory_stats()
    cuda.reach(20)
    meter.ends(1)
    meter.close()
    assert meter.bytes == 60
    assert torch.cuda.reset_peak_memory_stats == cuda.reset


def test_a_peak_from_before_the_steps_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    meter = CudaPeak(torch.device("cuda"), "allocated")
    meter.begins()
    meter.ends(1)
    meter.close()
    assert (meter.bytes, meter.how) == (10, "at most; reached outside the steps")


def test_memory_that_a_device_does_not_report_is_said_so() -> None:
    assert (
        meter_for(torch.device("cpu"), "reserved").how
        == "not measured: cpu reports no reserved memory"
    )
    meter = meter_for(torch.device("cpu"), "rss")
    meter.close()
    assert (meter.bytes or 0) > MIB


def watched(peak: int | None, device: str = "cpu", steps: int = 3) -> RunWatch:
    watch = RunWatch(plan(OVERWRITE), lambda _: None)
    watch.peak = PeakMeter("in step 2" if peak is not None else "not measured: too short")
    watch.peak.bytes, watch.device, watch.steps = peak, device, steps
    watch._seconds.extend([0.1, 0.3, 0.2])
    return watch


@pytest.mark.parametrize(
    ("peak", "device", "more", "said"),
    [
        (40, "cpu", {}, "40.0 MiB (in step 2), within the budget of 50.0 MiB (predicted 40.0 MiB)"),
        (60, "cpu", {}, "60.0 MiB (in step 2), 10.0 MiB OVER the budget of 50.0 MiB"),
        (60, "cuda:0", {}, "on cuda:0; the budget of 50.0 MiB is for cpu; for this device: t"),
        (60, "cpu", {"memory_kind": "rss"}, "OVER the budget of 50.0 MiB of rss memory"),
        (None, "cpu", {}, "3 steps with plan.toml: peak not measured: too short"),
    ],
)
def test_the_peak_stands_beside_the_budget(
    peak: int | None, device: str, more: dict[str, Any], said: str
) -> None:
    watch = watched(peak * MIB if peak is not None else None, device)
    ran, time = end_lines(plan(OVERWRITE, **more), HERE, watch, None, 0)
    assert said in ran
    other = "" if device == "cpu" else " on cpu"
    assert time == f"200 ms a step on {device} (median), predicted 200 ms{other}"


def test_an_emulated_device_predicts_no_time() -> None:
    predicted = Prediction(peak_bytes=1, step_seconds=0.2, device="emulated a100")
    _, time = end_lines(plan(OVERWRITE, predicted=predicted), HERE, watched(1), None, 0)
    assert time.endswith("; planned on an emulated A100, which predicts no time")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(0), "3 steps with plan.toml: peak"),
        (SystemExit(3), "3 steps with plan.toml, until SystemExit(3) in step 4: peak"),
        (KeyboardInterrupt(), ", until KeyboardInterrupt in step 4: peak"),
    ],
)
def test_it_says_what_ended_the_run(error: BaseException, said: str) -> None:
    ran, *_ = end_lines(plan(OVERWRITE), HERE, watched(1), error, 0)
    assert said in ran


def test_a_run_without_a_whole_step_has_no_figures() -> None:
    (ran,) = end_lines(plan(OVERWRITE), HERE, watched(None, steps=0), ValueError("x"), 0)
    assert ran == "0 steps with plan.toml, until ValueError in step 1"


def test_a_script_without_an_optimizer_has_no_figures() -> None:
    loop = Loop(plan(OVERWRITE), optimizers=0)
    for _ in range(3):
        loop.net(torch.ones(4, 8)).sum().backward()
    loop.watch.end()
    (ran,) = end_lines(plan(OVERWRITE), HERE, loop.watch, None, 0)
    assert ran.startswith("ran with plan.toml: no torch.optim optimizer stepped")


def test_the_start_says_what_is_applied() -> None:
    optimizer = Technique(name="optimizer_in_backward", where=("AdamW",))
    planned = plan(OVERWRITE, REPLAY, optimizer, inputs=("Net: float32[4, 8]",))
    applied, budget = start_lines(planned, HERE, verbose=False)
    assert applied == (
        "applied plan.toml: overwrite at 2 modules, replay at 1 place, optimizer_in_backward at AdamW"
    )
    assert budget == (
        "budget 50.0 MiB, predicted peak 40.0 MiB; certified: identical to the original, bit for bit, "
        "in 5 steps"
    )
    assert "Net.1, Net.3" in "\n".join(start_lines(planned, HERE, verbose=True))


def test_the_start_says_what_no_certificate_covers() -> None:
    *_, untried = start_lines(plan(OVERWRITE), HERE, verbose=False)
    assert "not certified: torchtrim verify train.py --plan plan.toml" in untried
    proof = plan(OVERWRITE, inputs=("Net: float32[4, 8]",)).certified
    *_, edited = start_lines(plan(REPLAY, certified=proof), HERE, verbose=False)
    assert edited.endswith("edited since it was certified")
    applied, _ = start_lines(plan(), HERE, verbose=False)
    assert applied == "applied plan.toml: it changes nothing, since the original fits"


def test_only_rank_0_speaks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank, lines in (("1", 0), ("0", 5)):
        monkeypatch.setenv("RANK", rank)
        report = RunReport(plan(OVERWRITE), HERE)
        net = nn.Linear(8, 8)
        report.root_appears("Net", net)
        report.applied(0)
        report.end(None)
        assert len(capfd.readouterr().err.splitlines()) == lines - bool(lines)


@pytest.mark.parametrize(("args", "lines"), [(("--amp",), 2), ((), 3), (None, 2)])
def test_other_arguments_than_certified_are_told(
    args: tuple[str, ...] | None, lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    made = plan(OVERWRITE, inputs=("Net: float32[8]",))
    assert made.certified is not None
    proof = msgspec.structs.replace(made.certified, args=("--amp",))
    RunReport(msgspec.structs.replace(made, certified=proof), HERE, args=args).start()
    said = capfd.readouterr().err.splitlines()
    assert len(said) == lines
    assert ("certified with the arguments --amp, not these" in said[-1]) == (lines == 3)
