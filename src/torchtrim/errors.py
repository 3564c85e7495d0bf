"""Errors that users meet. A message says what is wrong, where, why, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtrim.records.certificate import Certificate
    from torchtrim.records.figures import Lever
    from torchtrim.records.plan import Plan


_FULL = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out: Python's, a device's, or that of torch's CPU allocator."""
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    message = str(error).lower()
    return named or isinstance(error, MemoryError) or any(words in message for words in _FULL)


class TorchtrimError(Exception):
    """Base class of all errors for users. `exit_code`: the exit code of the command line."""

    exit_code = 2


class UsageError(TorchtrimError):
    """An invalid argument or option, or an invalid combination of them."""


class UnreadableInput(TorchtrimError):
    """A profile, plan or report that is damaged, truncated, malicious or newer than this torchtrim."""


class Unsupported(TorchtrimError):
    """A feature that torchtrim does not support for this model, device or version."""


class ScriptFailed(TorchtrimError):
    """The script itself failed, ended early or hung. `learnt`: what was recorded until then."""

    exit_code = 3

    def __init__(self, message: str, *, learnt: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.learnt = learnt
        self.traceback = traceback


class NothingTrains(ScriptFailed):
    """The script called its models and ended without a backward pass: it only runs inference."""


class InfeasibleBudget(TorchtrimError):
    """No plan fits the budget. `smallest_bytes`: the smallest feasible budget; `set_by`: what sets it.

    `plan` is the measured plan with that smallest peak, and `certificate` compares it with the original. If
    no technique lowers the peak, `plan` has no techniques and `certificate` is None. `levers` gives the peak
    that each technique reaches alone. These are set only if the workload ran planned. The model is unchanged.
    """

    exit_code = 1

    def __init__(self, message: str, *, smallest_bytes: int, set_by: str) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.set_by = set_by
        self.plan: Plan | None = None
        self.certificate: Certificate | None = None
        self.levers: tuple[Lever, ...] = ()


class ApplyFailed(TorchtrimError):
    """The plan could not be applied. The model is unchanged."""


class Diverged(TorchtrimError):
    """A step of a planned run differs from the original's. The run stopped before that step."""

    exit_code = 1


class ExportFailed(TorchtrimError):
    """The plan cannot be written as plain PyTorch. Nothing was written."""

    exit_code = 1


class PlannedStepFailed(ScriptFailed, ApplyFailed):
    """A step failed with a plan applied. `place`: the planned module that failed, or empty.

    The model is unchanged.
    """

    def __init__(
        self, message: str, *, place: str = "", learnt: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message, learnt=learnt, traceback=traceback)
        self.place = place
        self.plan: Plan | None = None
