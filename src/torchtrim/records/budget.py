"""A memory budget: as the user writes it, and in bytes once the original's peak is known."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torchtrim.core.units import Amount, parse_amount

MemoryKind = Literal["allocated", "reserved", "rss"]


class Budget(NamedTuple):
    """The bytes a plan may use, and the kind of memory they count.

    `bias`: the measured figure minus the simulated peak. `asked`: the budget as the user wrote it.
    """

    bytes: int
    kind: MemoryKind = "allocated"
    bias: int = 0
    asked: str = ""

    @property
    def simulated(self) -> int:
        """The highest simulated peak within the budget."""
        return self.bytes - self.bias

    def biased(self, bias: int) -> Budget:
        """Return the same budget with another bias."""
        return self._replace(bias=bias)


class MemoryLimit(NamedTuple):
    """A budget as the user writes it, `asked`: bytes, or a share of the original's peak."""

    amount: Amount
    kind: MemoryKind = "allocated"
    asked: str = ""

    def budget(self, whole: int) -> Budget:
        """Return the budget for an original that needs `whole` bytes."""
        return Budget(self.amount.of(whole), self.kind, asked=self.asked)


def memory_limit(text: str | int, kind: MemoryKind = "allocated") -> MemoryLimit:
    """Parse `--memory`: `"8GiB"`, `"60%"` or bytes. Raises `UsageError` for anything else."""
    return MemoryLimit(parse_amount(text), kind, str(text))
