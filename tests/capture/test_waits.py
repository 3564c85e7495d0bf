"""What waits for the device and what races with it: traps, and three bugs of the past with their fixes."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchtrim.capture.recording import record_call
from torchtrim.capture.waits import SyncCounter
from torchtrim.emulator import emulate
from torchtrim.records.profile import Profile

Call = Callable[[], Any]


def rows(call: Call) -> dict[str, int]:
    """How often a call waits, and races, by the row of the table."""
    profile: Profile = record_call(call, device="emulated")
    return dict(Counter(sync.row for sync in profile.syncs))


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with emulate():
        yield


def made() -> Tensor:
    return torch.randn(8, device="cuda")


def late(x: Tensor | None = None) -> Tensor:
    """A copy to the host that may not have arrived."""
    return (made() if x is None else x).to("cpu", non_blocking=True)


def pinned(value: float = 1.0) -> Tensor:
    return torch.full((8,), value, pin_memory=True)


READS: dict[str, Callable[[Tensor], Any]] = {
    "an operator": lambda h: h.sum(),
    "an operator on a view": lambda h: h[2:4].view(2, 1) * 2,
    "numpy": lambda h: h.numpy(),
    "asarray": lambda h: np.asarray(h),
    "tolist": lambda h: h.tolist(),
    "tolist of a view": lambda h: h[1:].tolist(),
    "item": lambda h: h[0].item(),
    "float": lambda h: float(h[0]),
    "if": lambda h: bool(h[0]),
    "print": lambda h: str(h),
    "a loop": lambda h: [float(value) for value in h],
    "a list": lambda h: torch.stack([h, h]),
    "another type": lambda h: h.double(),
    "a copy on the host": lambda h: torch.empty(8).copy_(h),
    "a part of it": lambda h: torch.empty(2).copy_(h[:2]),
    "clone": lambda h: h.clone(),
    "comparison": lambda h: h > 0,
}


@pytest.mark.parametrize("name", READS)
def test_a_copy_that_is_read_too_early(name: str) -> None:
    assert rows(lambda: READS[name](late())) == {"async-read": 1}


@pytest.mark.parametrize("name", READS)
def test_a_copy_that_was_waited_for(name: str) -> None:
    def call() -> None:
        host = late()
        torch.cuda.synchronize()
        READS[name](host)

    assert rows(call) == {"synchronize": 1}


def test_what_does_not_read() -> None:
    def call() -> None:
        host = late()
        _ = (host.shape, host.dtype, host[:2], host.view(2, 4), host.is_pinned(), host.data_ptr())
        host.detach().t()

    assert rows(call) == {}


def by_event(host: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def by_asking(host: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    while not event.query():
        pass


def by_asking_the_stream(host: Tensor) -> None:
    while not torch.cuda.current_stream().query():
        pass


FIXES: dict[str, tuple[Callable[[Tensor], Any], dict[str, int]]] = {
    "an event": (by_event, {"event-synchronize": 1}),
    "an event that was asked": (by_asking, {}),
    "a stream that was asked": (by_asking_the_stream, {}),
    "the stream": (
        lambda host: torch.cuda.current_stream().synchronize(),
        {"stream-synchronize": 1},
    ),
    "the device": (lambda host: torch.accelerator.synchronize(), {"synchronize": 1}),
    "a number that is read": (lambda host: torch.ones((), device="cuda").item(), {"item": 1}),
    "a copy that is waited for": (lambda host: made().cpu(), {"copy-to-host": 1}),
}


@pytest.mark.parametrize("name", FIXES)
def test_what_makes_a_read_safe(name: str) -> None:
    fix, expected = FIXES[name]

    def call() -> None:
        host = late()
        fix(host)
        host.sum()

    assert rows(call) == expected


def test_an_event_of_before_the_copy_does_not_help() -> None:
    def call() -> None:
        event = torch.cuda.Event()
        event.record()
        host = late()
        event.synchronize()
        host.sum()

    assert rows(call) == {"event-synchronize": 1, "async-read": 1}


def test_an_event_that_was_never_recorded_does_not_help() -> None:
    def call() -> None:
        host = late()
        torch.cuda.Event().synchronize()
        host.sum()

    assert rows(call) == {"event-synchronize": 1, "async-read": 1}


def on_a_stream(joined: Callable[[Any], None] | None) -> Call:
    """A copy on a stream of its own; the current one may wait for it; then a number is read on that."""

    def call() -> None:
        x, stream = made(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host = late(x)
        if joined is not None:
            joined(stream)
        x.sum().item()
        host.sum()

    return call


def waits_for_an_event(stream: Any) -> None:
    torch.cuda.current_stream().wait_event(stream.record_event())


def test_a_number_read_on_another_stream_does_not_help() -> None:
    assert rows(on_a_stream(None)) == {"item": 1, "async-read": 1}


def test_unless_that_stream_waits_for_the_copys() -> None:
    waiting = {"item": 1}
    assert rows(on_a_stream(lambda s: torch.cuda.current_stream().wait_stream(s))) == waiting
    assert rows(on_a_stream(waits_for_an_event)) == waiting
    assert rows(on_a_stream(lambda s: s.record_event().wait())) == waiting


def test_streams_that_wait_for_each_other() -> None:
    def call() -> None:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            host = late()
        for _ in range(3):
            second.wait_stream(first)
            first.wait_stream(second)
        second.synchronize()
        host.sum()

    assert rows(call) == {"stream-synchronize": 1}


def test_streams_that_wait_for_each_other_many_times() -> None:
    def call() -> None:
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        for _ in range(100):
            one.wait_stream(other)
            other.wait_stream(one)
            torch.cuda.current_stream().wait_stream(other)
            one.wait_stream(torch.cuda.current_stream())
        made().sum().item()

    assert rows(call) == {"item": 1}


def test_a_wait_of_before_the_copy_does_not_help() -> None:
    def call() -> None:
        x, stream = made(), torch.cuda.Stream()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.stream(stream):
            host = late(x)
        torch.cuda.current_stream().synchronize()
        host.sum()

    assert rows(call) == {"stream-synchronize": 1, "async-read": 1}


def test_a_target_of_ones_own() -> None:
    def into(target: Tensor) -> Call:
        return lambda: target.copy_(made(), non_blocking=True).mean()

    assert rows(into(pinned())) == {"async-read": 1}
    assert rows(into(torch.empty(8))) == {"copy-into-host": 1}
    assert rows(into(torch.empty(16, pin_memory=True)[::2])) == {"copy-into-host": 1}


def test_what_goes_back_to_the_device_is_in_order() -> None:
    assert rows(lambda: late().to("cuda", non_blocking=True)) == {}


def test_a_source_that_is_overwritten() -> None:
    def call() -> None:
        source, target = pinned(), torch.empty(8, device="cuda")
        for value in range(4):
            source.fill_(value)
            target.copy_(source, non_blocking=True)

    assert rows(call) == {"async-source": 3}


@pytest.mark.parametrize(
    "write", [lambda s: s.zero_(), lambda s: s.copy_(torch.ones(8)), lambda s: s[0].add_(1)]
)
def test_ways_to_overwrite_a_source(write: Callable[[Tensor], Any]) -> None:
    def call() -> None:
        source = pinned()
        source.to("cuda", non_blocking=True)
        write(source)

    assert rows(call) == {"async-source": 1}


def test_a_source_may_be_read_and_dropped() -> None:
    def call() -> None:
        for _ in range(3):
            source = pinned()
            source.to("cuda", non_blocking=True)
            source.sum()

    assert rows(call) == {}


def test_two_buffers_with_events() -> None:
    def call() -> None:
        buffers = [pinned(), pinned()]
        events: list[Any] = [None, None]
        target = torch.empty(8, device="cuda")
        for step in range(4):
            turn = step % 2
            if events[turn] is not None:
                events[turn].synchronize()
            buffers[turn].fill_(step)
            target.copy_(buffers[turn], non_blocking=True)
            events[turn] = torch.cuda.current_stream().record_event()

    assert rows(call) == {"event-synchronize": 2}


def test_two_buffers_without_events() -> None:
    def call() -> None:
        target = torch.empty(8, device="cuda")
        for buffer, step in zip(itertools.cycle([pinned(), pinned()]), range(4), strict=False):
            buffer.fill_(step)
            target.copy_(buffer, non_blocking=True)

    assert rows(call) == {"async-source": 2}


def predictions_to_host(outputs: list[Tensor], *, late: bool) -> list[Any]:
    """As Lightning moved the predictions of each batch to the CPU before they were written to a file."""
    moved = [output.detach().to("cpu", non_blocking=late) for output in outputs]
    return [output.numpy() for output in moved]


def test_lightning_11288() -> None:
    """Predictions were zeros: they were moved to the CPU with `non_blocking=True`, then read."""
    assert rows(lambda: predictions_to_host([made(), made()], late=True)) == {"async-read": 2}
    fixed = rows(lambda: predictions_to_host([made(), made()], late=False))
    assert fixed == {"copy-to-host": 2}


def safe_divide(numerator: Tensor, denominator: Tensor, *, late: bool) -> Tensor:
    """As torchmetrics made the value that stands for a division by zero."""
    instead = torch.tensor(0.0).to(numerator.device, non_blocking=late)
    return torch.where(denominator != 0, numerator / denominator, instead)


def test_torchmetrics_3095() -> None:
    """The number was copied late from memory that was free again at once."""
    assert "async-source" in rows(lambda: safe_divide(made(), made(), late=True))
    assert rows(lambda: safe_divide(made(), made(), late=False)) == {"upload": 1}
    made_there = rows(lambda: torch.where(made() != 0, made(), torch.zeros((), device="cuda")))
    assert made_there == {}


def next_tokens(logits: Tensor, *, waits: bool) -> list[int]:
    """As SGLang overlapped the copy of the chosen tokens with the next batch."""
    tokens = logits.argmax(-1).to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    if waits:
        done.synchronize()
    return tokens.tolist()


def test_sglang_16493() -> None:
    """Tokens of the batch before were given out: the copy was read without its event."""
    logits = torch.randn(4, 16, device="cuda")
    assert rows(lambda: next_tokens(logits, waits=False)) == {"async-read": 1}
    assert rows(lambda: next_tokens(logits, waits=True)) == {"event-synchronize": 1}


def test_a_race_names_its_operator_and_line() -> None:
    def call() -> None:
        host = late()
        host.sum()

    profile = record_call(call, device="emulated")
    (sync,) = profile.syncs
    place = profile.place_of(sync.operator)
    assert profile.operators[sync.operator].name == "aten::sum.default"
    assert place is not None
    assert place.line == call.__code__.co_firstlineno + 2


def test_nothing_is_kept_from_one_recording_to_the_next() -> None:
    hosts: list[Tensor] = []
    assert rows(lambda: hosts.append(late())) == {}
    assert rows(lambda: hosts[0].sum()) == {}


SYNC = "called a synchronizing CUDA operation (function warn_or_error_on_sync)"


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", seen.append)
    return seen


def test_every_warning_counts_though_it_is_the_same(modes: list[object]) -> None:
    counter = SyncCounter()
    with counter.counting():
        for _ in range(3):
            warnings.warn(SYNC, UserWarning, stacklevel=1)
    assert counter.count == 3
    assert modes == ["warn", "default"]


def test_other_warnings_go_where_they_would_have_gone(modes: list[object]) -> None:
    counter = SyncCounter()
    with pytest.warns(UserWarning, match="something else"), counter.counting():
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert counter.count == 0


def test_the_mode_is_put_back_where_the_program_fails(modes: list[object]) -> None:
    with pytest.raises(ValueError, match="no"), SyncCounter().counting():
        raise ValueError("no")
    assert modes == ["warn", "default"]
