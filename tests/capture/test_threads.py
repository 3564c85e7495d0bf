"""Recordings in several threads take turns, each with its own emulated device."""

from __future__ import annotations

import threading

import torch

from torchtrim.capture.recording import record_call


def test_a_recording_that_waited_for_another_emulates_its_device() -> None:
    recording, may_end = threading.Event(), threading.Event()
    peaks: dict[str, int] = {}

    def first() -> None:
        torch.ones(4, device="cuda")
        recording.set()
        may_end.wait(5)

    def record(name: str, function: object) -> None:
        assert callable(function)
        peaks[name] = record_call(function, device="emulated").peak_bytes

    one = threading.Thread(target=record, args=("first", first))
    other = threading.Thread(target=record, args=("second", lambda: torch.ones(4, device="cuda")))
    one.start()
    recording.wait(5)
    other.start()
    other.join(0.5)
    may_end.set()
    one.join()
    other.join()
    assert set(peaks) == {"first", "second"}
