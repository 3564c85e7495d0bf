"""A memory budget: as a person writes it, and in bytes once the original's peak is known."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torchtrim.core.units import Amount, parse_amount

MemoryKind = Literal["allocated", "reserved", "rss"]


class Budget(NamedTuple):
    """The bytes within which a plan has to stay, of which kind of memory.

    `bias`: by how much the measured figure is over the simulated peak.
    """

    bytes: int
    kind: MemoryKind = "allocated"
    bias: int = 0

    @property
    def simulated(self) -> int:
        """The highest simulated peak that is within the budget."""
        return self.bytes - self.bias

    def biased(self, bias: int) -> Budget:
        """The same budget with another bias."""
        return self._replace(bias=bias)


class MemoryLimit(NamedTuple):
    """A budget as a person gives it: bytes, or a share of the original's own peak."""

    amount: Amount
    kind: MemoryKind = "allocated"

    def budget(self, whole: int) -> Budget:
        """The budget, for an original that needs `whole` bytes."""
        return Budget(self.amount.of(whole), self.kind)


def memory_limit(text: str | int, kind: MemoryKind = "allocated") -> MemoryLimit:
    """Read `--memory`: `"8GiB"`, `"60%"` or bytes. Raises `UsageError` for anything else."""
    return MemoryLimit(parse_amount(text), kind)
