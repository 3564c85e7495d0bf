"""What is known of the values at a place: the executions that a probe saw, and what they left open."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torchtrim.records.seen import Execution, Observed, Seen

T = TypeVar("T")


class Refused(Exception):
    """A fix must not be applied here. The message says why, and what to do instead."""


class Values:
    """The values of one execution, by name of the part: `values.X.shape`."""

    def __init__(self, execution: Execution) -> None:
        self.grad = execution.grad
        self.count = execution.count
        self._values = execution.values

    def has(self, name: str) -> bool:
        """Whether the part was computed: what is before a loop is not seen in each round of it."""
        return name in self._values

    def __getattr__(self, name: str) -> Seen:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None


class Facts:
    """The evidence for one match, and what it does not show.

    Without an observation nothing is known: every need is then left open, and `missing` names it.
    """

    def __init__(self, observed: Observed | None = None) -> None:
        known = observed.executions if observed is not None and not observed.capped else ()
        self.executions = tuple(Values(one) for one in known)
        self.missing: list[str] = []

    @property
    def seen(self) -> bool:
        """Whether there is evidence at all."""
        return bool(self.executions)

    def need(self, text: str, holds: Callable[[Values], bool]) -> None:
        """What must hold in each execution. Raises `Refused` if it does not in one."""
        for values in self.executions:
            try:
                held = holds(values)
            except AttributeError:
                self.leave_open(text)
                return
            if not held:
                raise Refused(f"it needs that {text}, and in a run that was watched it was not so")
        if not self.executions:
            self.leave_open(text)

    def holds(self, test: Callable[[Values], bool]) -> bool:
        """Whether it holds in each execution that was seen; False where none was."""
        try:
            return self.seen and all(map(test, self.executions))
        except AttributeError:
            return False

    def only(self, what: str, get: Callable[[Values], T], unseen: T) -> T:
        """What each execution has in common. Raises `Refused` where they differ."""
        try:
            found = {get(values) for values in self.executions}
        except AttributeError:
            return unseen
        if len(found) > 1:
            raise Refused(f"{what} is not the same in all runs that were watched")
        return found.pop() if found else unseen

    def leave_open(self, text: str) -> None:
        """Note a fact that is needed and not shown."""
        if text not in self.missing:
            self.missing.append(text)


def is_tensor(*values: Seen) -> bool:
    """Whether all are tensors."""
    return all(value.kind in ("tensor", "Parameter") for value in values)


def is_mask(mask: Seen, of: Seen) -> bool:
    """Whether it is a boolean tensor of the shape, device included, that the other begins with."""
    return (
        is_tensor(mask, of)
        and mask.dtype == "bool"
        and mask.device == of.device
        and len(mask.shape) > 0
        and of.shape[: len(mask.shape)] == mask.shape
    )


def is_number(value: Seen) -> bool:
    """Whether it is a number of Python's."""
    return value.kind in ("int", "float", "bool")


def is_floating(value: Seen) -> bool:
    """Whether it is a tensor of a real floating type."""
    return is_tensor(value) and value.dtype.startswith(("float", "bfloat"))


def is_integral(value: Seen) -> bool:
    """Whether it is a tensor of integers or truth values."""
    return is_tensor(value) and value.dtype.startswith(("int", "uint", "bool"))


def without_grad(values: Values, *parts: Seen) -> bool:
    """Whether no gradient flows through these."""
    return not values.grad or not any(part.requires_grad for part in parts)
