"""What is known of the values at a place: the executions that a probe saw, what the source alone tells, and
what both leave open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torchtrim.records.seen import Observed, Seen

T = TypeVar("T")
_TENSORS = ("tensor", "Parameter")
_NUMBERS = ("int", "float", "bool")


class Refused(Exception):
    """A fix must not be applied here. The message says why, and what to do instead."""


class Told:
    """What the source alone tells of a value: some fields of a `Seen`. The others are missing."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class NoTensor(str):
    """The kind of a value that is no tensor, `"plain"` for one that may be a number. More is missing."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if other in _TENSORS or (other in _NUMBERS and str.__ne__(self, "plain")):
            return False
        raise AttributeError("kind")

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        raise AttributeError("kind")


class Values:
    """The values of one execution, or what the source tells of them, by part: `values.X.shape`."""

    def __init__(self, values: Mapping[str, Any], *, grad: bool = True, count: int = 1) -> None:
        self.grad = grad
        self.count = count
        self._values = values

    def has(self, name: str) -> bool:
        """Whether the part was computed: what is before a loop is not seen in each round of it."""
        return name in self._values

    def __getattr__(self, name: str) -> Seen:
        try:
            return cast(Seen, self._values[name])
        except KeyError:
            raise AttributeError(name) from None


class _ToldValues(Values):
    """What the source tells of values, which may be nothing."""

    def has(self, name: str) -> bool:
        return True

    def __getattr__(self, name: str) -> Seen:
        return cast(Seen, self._values.get(name, Told()))


class Facts:
    """The evidence for one match, and what it does not show.

    `told`: what the source says of the parts, by name. Without an observation no more is known: every need
    that it does not contradict is left open, and `missing` names it.
    """

    def __init__(
        self, observed: Observed | None = None, told: Mapping[str, Told] | None = None
    ) -> None:
        known = observed.executions if observed is not None and not observed.capped else ()
        self.executions = tuple(Values(one.values, grad=one.grad, count=one.count) for one in known)
        self._told = _ToldValues(told or {})
        self.missing: list[str] = []

    @property
    def seen(self) -> bool:
        """Whether there is evidence at all."""
        return bool(self.executions)

    def need(
        self,
        text: str,
        holds: Callable[[Values], bool],
        told: Callable[[Values], bool] | None = None,
    ) -> None:
        """What must hold in each execution. Raises `Refused` if it does not in one.

        Where none was watched it is left open, unless the source contradicts it. `told`: what the source
        itself has to say then, for a need that is mostly wrong where it does not.
        """
        for values in self.executions:
            try:
                held = holds(values)
            except AttributeError:
                self.leave_open(text)
                return
            if not held:
                raise Refused(f"it needs that {text}, and in a run that was watched it was not so")
        if not self.executions:
            self._need_unseen(text, holds, told)

    def _need_unseen(
        self,
        text: str,
        holds: Callable[[Values], bool],
        told: Callable[[Values], bool] | None,
    ) -> None:
        if self.is_told(holds) is False:
            raise Refused(f"it needs that {text}, and the source says otherwise")
        if told is not None and not self.is_told(told):
            raise Refused(
                f"it needs that {text}, and the source does not say so. Run the script under "
                "`torchtrim optimize --fix`, which looks"
            )
        self.leave_open(text)

    def is_told(self, test: Callable[[Values], bool]) -> bool | None:
        """Whether it holds by the source alone, None where that does not tell."""
        try:
            return test(self._told)
        except AttributeError:
            return None

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
    """Whether all are tensors. Raises `AttributeError` where that is not known of one, and it may be."""
    known = [value.kind in _TENSORS for value in values if hasattr(value, "kind")]
    if all(known) and len(known) < len(values):
        raise AttributeError("kind")
    return all(known)


def need_tensor(facts: Facts, part: str, text: str) -> None:
    """It must be a tensor; without a run the source has to say so."""

    def told(values: Values) -> bool:
        return is_tensor(getattr(values, part))

    facts.need(f"`{text[:60]}` is a tensor", told, told=told)


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
    return value.kind in _NUMBERS


def is_floating(value: Seen) -> bool:
    """Whether it is a tensor of a real floating type."""
    return is_tensor(value) and value.dtype.startswith(("float", "bfloat"))


def is_integral(value: Seen) -> bool:
    """Whether it is a tensor of integers or truth values."""
    return is_tensor(value) and value.dtype.startswith(("int", "uint", "bool"))


def without_grad(values: Values, *parts: Seen) -> bool:
    """Whether no gradient flows through these."""
    return not values.grad or not any(part.requires_grad for part in parts)
