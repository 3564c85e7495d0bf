"""Evidence on the values at a place: what a run showed, what the source shows, and what neither does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torchtrim.records.probes import ObservedValue, ProbeResult

T = TypeVar("T")
_TENSORS = ("tensor", "Parameter")
_NUMBERS = ("int", "float", "bool")


class FixRefused(Exception):
    """A fix must not be applied here. The message gives the reason and an alternative."""


class StaticValue:
    """Some fields of an `ObservedValue`, inferred from the source alone. The others are missing."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class NoTensor(str):
    """The kind of a value that is not a tensor; `"plain"` if it may be a number.

    Comparisons that it cannot answer raise `AttributeError`.
    """

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
    """The values of one execution, or what the source says about them, by part: `values.X.shape`."""

    def __init__(self, values: Mapping[str, Any], *, grad: bool = True) -> None:
        self.grad = grad
        self._values = values

    def has(self, name: str) -> bool:
        """Return True if the part was computed. A part before a loop is not observed in each iteration."""
        return name in self._values

    def __getattr__(self, name: str) -> ObservedValue:
        try:
            return cast(ObservedValue, self._values[name])
        except KeyError:
            raise AttributeError(name) from None


class _StaticValues(Values):
    """Values inferred from the source. Parts that the source says nothing about have no fields."""

    def has(self, name: str) -> bool:
        return True

    def __getattr__(self, name: str) -> ObservedValue:
        return cast(ObservedValue, self._values.get(name, StaticValue()))


class Facts:
    """The evidence for one match, from runs and, as `static`, from the source; `missing` lists the gaps."""

    def __init__(
        self,
        observed: ProbeResult | None = None,
        static: Mapping[str, StaticValue] | None = None,
    ) -> None:
        known = observed.executions if observed is not None and not observed.capped else ()
        self.executions = tuple(Values(run.values, grad=run.grad) for run in known)
        self._static = _StaticValues(static or {})
        self.missing: list[str] = []

    @property
    def seen(self) -> bool:
        """True if a run was observed."""
        return bool(self.executions)

    def need(
        self,
        text: str,
        holds: Callable[[Values], bool],
        static: Callable[[Values], bool] | None = None,
    ) -> None:
        """Require a condition in each execution. Raises `FixRefused` if one violates it.

        Without an observation the condition stays open, unless the source contradicts it. `static` is a
        condition that the source must show in that case.
        """
        try:
            held = all(map(holds, self.executions))
        except AttributeError:
            self.leave_open(text)
            return
        if not held:
            raise FixRefused(f"it requires that {text}, which an observed run contradicts")
        if self.executions:
            return
        if self.holds_statically(holds) is False:
            raise FixRefused(f"it requires that {text}, which the source contradicts")
        if static is not None and not self.holds_statically(static):
            raise FixRefused(
                f"it requires that {text}, which the source does not show. Run `torchtrim "
                "optimize --fix`"
            )
        self.leave_open(text)

    def holds_statically(self, test: Callable[[Values], bool]) -> bool | None:
        """Return the test's result on the source alone, or None if the source does not decide it."""
        try:
            return test(self._static)
        except AttributeError:
            return None

    def holds(self, test: Callable[[Values], bool]) -> bool:
        """Return True if the test holds in each observed execution; False if there was none."""
        try:
            return self.seen and all(map(test, self.executions))
        except AttributeError:
            return False

    def only(self, what: str, get: Callable[[Values], T], unseen: T) -> T:
        """Return the value that all executions share. Raises `FixRefused` if they differ."""
        try:
            different = {get(values) for values in self.executions}
        except AttributeError:
            return unseen
        if len(different) > 1:
            raise FixRefused(f"{what} differs between observed runs")
        return different.pop() if different else unseen

    def leave_open(self, text: str) -> None:
        """Add a needed fact that no evidence shows."""
        if text not in self.missing:
            self.missing.append(text)


def is_tensor(*values: ObservedValue) -> bool:
    """Return True if all values are tensors. Raises `AttributeError` if the evidence leaves that open."""
    known = [value.kind in _TENSORS for value in values if hasattr(value, "kind")]
    if all(known) and len(known) < len(values):
        raise AttributeError("kind")
    return all(known)


def of_part(part: str, get: Callable[[ObservedValue], T]) -> Callable[[Values], T]:
    """Return a property of one part's value, for `Facts.need`, `Facts.holds` and `Facts.only`."""
    return lambda values: get(getattr(values, part))


def is_mask(mask: ObservedValue, of: ObservedValue) -> bool:
    """Return True for a boolean tensor on the other's device whose shape starts the other's shape."""
    return (
        is_tensor(mask, of)
        and mask.dtype == "bool"
        and mask.device == of.device
        and len(mask.shape) > 0
        and of.shape[: len(mask.shape)] == mask.shape
    )


def is_number(value: ObservedValue) -> bool:
    """Return True for a Python number."""
    return value.kind in _NUMBERS


def is_int(value: ObservedValue) -> bool:
    """Return True for a Python integer that is not a boolean."""
    return value.kind == "int"


def are_lengths(value: ObservedValue) -> bool:
    """Return True for a one-dimensional tensor of integers."""
    integers = is_tensor(value) and value.dtype in ("int64", "int32", "int16", "uint8")
    return integers and len(value.shape) == 1


def is_floating(value: ObservedValue) -> bool:
    """Return True for a tensor of a real floating type."""
    return is_tensor(value) and value.dtype.startswith(("float", "bfloat"))


def is_integral(value: ObservedValue) -> bool:
    """Return True for a tensor of integers or booleans."""
    return is_tensor(value) and value.dtype.startswith(("int", "uint", "bool"))


def without_grad(values: Values, *parts: ObservedValue) -> bool:
    """Return True if no gradient flows through the values."""
    return not values.grad or not any(part.requires_grad for part in parts)
