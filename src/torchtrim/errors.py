"""Every error that a person can meet. A message says what is wrong, where, why, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtrim.records.certificate import Certificate
    from torchtrim.records.lever import Lever
    from torchtrim.records.plan import Plan


_FULL = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out: Python's, a device's, or that of torch's CPU allocator."""
    named = any(one.__name__ == "OutOfMemoryError" for one in type(error).__mro__)
    said = str(error).lower()
    return named or isinstance(error, MemoryError) or any(word in said for word in _FULL)


class TorchtrimError(Exception):
    """Root of all errors that torchtrim raises for people; `exit_code` is what the command line ends with."""

    exit_code = 2


class UsageError(TorchtrimError):
    """An argument, an option or a combination of them that cannot be meant."""


class UnreadableInput(TorchtrimError):
    """A profile, plan or report that is damaged, truncated, hostile or newer than this torchtrim."""


class Unsupported(TorchtrimError):
    """Something that torchtrim knows of and does not do for this model, device or version."""


class ScriptFailed(TorchtrimError):
    """The script itself failed, ended early or hung. `learnt` says what was seen until then."""

    exit_code = 3

    def __init__(self, message: str, *, learnt: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.learnt = learnt
        self.traceback = traceback


class NothingTrains(ScriptFailed):
    """The script called its models and ended, and there was no backward: it only runs them."""


class InfeasibleBudget(TorchtrimError):
    """No plan fits the budget. `smallest_bytes` is the smallest that would; `set_by` names what sets it.

    `plan` is the one that needs so much, measured, and `certificate` says whether it computes the same; it
    has no techniques where none lowers the peak, and then there is no certificate. `levers` are what each
    technique alone would reach. They are there where the workload was run planned. The model is as it was.
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
    """A plan could not be applied. The model is as it was."""


class Diverged(TorchtrimError):
    """A step of a planned run does not equal the original's. It was stopped before that step."""

    exit_code = 1


class ExportFailed(TorchtrimError):
    """A plan that cannot be written as plain PyTorch. Nothing was written."""

    exit_code = 1


class PlannedStepFailed(ScriptFailed, ApplyFailed):
    """A step failed with a plan applied. `place`: where the plan had changed what failed, empty if unknown.

    The model is as it was.
    """

    def __init__(
        self, message: str, *, place: str = "", learnt: str = "", traceback: str = ""
    ) -> None:
        super().__init__(message, learnt=learnt, traceback=traceback)
        self.place = place
        self.plan: Plan | None = None
