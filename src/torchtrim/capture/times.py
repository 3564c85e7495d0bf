"""Times of operators from steps that are recorded for nothing else."""

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
_PATIENCE = 2.0
Timed = list[tuple[str, float]]
"""The operators of a step, each with its seconds."""


class Times:
    """Records up to `wanted` steps of about `seconds` each, none of them if they take longer than 3 s."""

    def __init__(self, wanted: int, seconds: float, places: Places) -> None:
        self.steps: list[Timed] = []
        self._left = wanted if seconds <= _LONGEST else 0
        self._seconds = seconds
        self._places = places
        self._began = 0.0
        self._recorder: Recorder | None = None

    def next(self) -> bool:
        """Begin another step; False if there are to be no more."""
        if not self._left or self._recorder is not None:
            return False
        self._left -= 1
        self._began = time.perf_counter()
        self._recorder = Recorder(self._places, saves=False)
        self._recorder.start(scan=False)
        return True

    def late(self) -> bool:
        """Whether the step that runs takes so long that more than a step must have begun."""
        if self._recorder is None:
            return False
        return time.perf_counter() - self._began > _PATIENCE * self._seconds + 0.1

    def step_ends(self) -> None:
        """The step that runs is complete. After one that was late there is no other."""
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
        """The step that runs is not wanted, nor any other."""
        recorder, self._recorder, self._left = self._recorder, None, 0
        if recorder is not None:
            recorder.stop()
            recorder.storages.forget()


def with_times(profile: Profile, steps: Sequence[Timed]) -> Profile:
    """The profile with times from those steps too that ran the same operators in the same order."""
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
