"""Times operators in extra recorded steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from msgspec.structs import replace

from torchtrim.capture.build import name_of
from torchtrim.capture.recorder import Recorder
from torchtrim.dispatch.places import Places
from torchtrim.records.profile import Profile

_LONGEST = 3.0
"""Seconds. Arbitrary: for slower steps more of them would take too long."""
_PATIENCE = 2.0
"""Arbitrary: a step that takes twice as long as usual must be several."""

Timed = list[tuple[str, float]]
"""A step's operators, each with its seconds."""


class Times:
    """A recorder of up to `wanted` steps of about `seconds` each, or none if they take longer than 3 s."""

    def __init__(self, wanted: int, seconds: float, places: Places) -> None:
        self.steps: list[Timed] = []
        self._left = wanted if seconds <= _LONGEST else 0
        self._seconds = seconds
        self._places = places
        self._began = 0.0
        self._recorder: Recorder | None = None

    def next(self) -> bool:
        """Begin another step; return False if no more are needed."""
        if not self._left or self._recorder is not None:
            return False
        self._left -= 1
        self._began = time.perf_counter()
        self._recorder = Recorder(self._places, saves=False)
        self._recorder.start(scan=False)
        return True

    def late(self) -> bool:
        """Return True if the running step takes so long that it must be more than one."""
        if self._recorder is None:
            return False
        return time.perf_counter() - self._began > _PATIENCE * self._seconds + 0.1

    def step_ends(self) -> None:
        """End the running step. If it was late, do not begin another."""
        if self.late():
            self._left = 0
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
            recorder.storages.forget()
            self.steps.append(
                [(name_of(op.func), (op.end_ns - op.start_ns) / 1e9) for op in recorder.operators]
            )

    def abandon(self) -> None:
        """Drop the running step and begin no other."""
        recorder, self._recorder, self._left = self._recorder, None, 0
        if recorder is not None:
            recorder.stop()
            recorder.storages.forget()


def with_times(profile: Profile, steps: Sequence[Timed]) -> Profile:
    """Return the profile with median times, including those steps that ran the same operators in order."""
    names = [op.name for op in profile.operators]
    alike = [step for step in steps if [name for name, _ in step] == names]
    if not alike:
        return profile
    operators = []
    for index, op in enumerate(profile.operators):
        taken = [op.seconds, *(step[index][1] for step in alike)]
        spread = max(taken) - min(taken)
        operators.append(replace(op, seconds=statistics.median(taken), spread=spread))
    return replace(profile, operators=operators, recorded_steps=1 + len(alike))
