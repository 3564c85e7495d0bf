"""What a session learns of what grows from step to step: between the compared steps, then in one more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from torchtrim.capture.growth.steps import StepGrowth
from torchtrim.dispatch.places import Places
from torchtrim.records.profile import Profile

_PATIENCE, _LEAST = 20.0, 2.0
"""Of how many steps' time, and how many seconds more, a step may take whose lines are followed."""


class GrowthPhase:
    """Looks for growth after each of so many steps, 0 for none, and within one more."""

    def __init__(
        self, steps: int, places: Places, modules: Callable[[], Iterable[nn.Module]]
    ) -> None:
        self._growth = StepGrowth(steps, places, modules)
        self._until = 0.0

    @property
    def runs(self) -> bool:
        """Whether a step is run for it."""
        return self._growth.follows

    def step_ended(self, peak: int) -> None:
        """Look, after a compared step with this peak."""
        with torch.utils._python_dispatch._disable_current_modes():
            self._growth.step_ended(peak)

    def next(self, seconds: float) -> bool:
        """Begin a step of about so many seconds that is run for it; False if there is to be none.

        Of several ranks all run it, since each waits for the others' gradients.
        """
        self._until = time.perf_counter() + _PATIENCE * seconds + _LEAST
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        with torch.utils._python_dispatch._disable_current_modes():
            return self._growth.next(always=several)

    def late(self) -> bool:
        """Whether the step that is run for it takes so long that the loop does something else."""
        return self.runs and time.perf_counter() > self._until

    def step_ends(self) -> None:
        """The step that is run for it is over, if one is."""
        self._growth.stop()

    def into(self, profile: Profile) -> Profile:
        """The profile with what grows."""
        return self._growth.into(profile)
