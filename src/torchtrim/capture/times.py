"""Times operators in extra recorded steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from msgspec.structs import replace

from torchtrim.capture.recorder import Recorder
from torchtrim.dispatch.modes import full_name
from torchtrim.dispatch.places import Places
from torchtrim.records.profile import Profile

_LONGEST = 3.0
"""Seconds. Arbitrary: recording more of slower steps would take too long."""
_PATIENCE = 2.0
"""Arbitrary: a step that takes twice as long as usual must be more than one."""

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
        running = time.perf_counter() - self._began
        return self._recorder is not None and running > _PATIENCE * self._seconds + 0.1

    def step_ends(self) -> None:
        """End the running step. If it was late, do not begin another."""
        if self.late():
            self._left = 0
        if (recorder := self._stopped()) is not None:
            self.steps.append(
                [(full_name(op.func), (op.end_ns - op.start_ns) / 1e9) for op in recorder.operators]
            )

    def abandon(self) -> None:
        """Drop the running step and begin no other."""
        self._left = 0
        self._stopped()

    def _stopped(self) -> Recorder | None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
            recorder.storages.forget()
        return recorder


def with_times(profile: Profile, steps: Sequence[Timed]) -> Profile:
    """Return the profile with median times over itself and the steps that ran the same operators."""
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
