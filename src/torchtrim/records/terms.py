"""Terms of planning: what a plan may change, and what every plan of a workload has to respect."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from torchtrim.errors import UsageError
from torchtrim.records.finding import EQUIVALENCES, Equivalence

_RANK = EQUIVALENCES.index


class Allowance(NamedTuple):
    """`least`: the weakest equivalence allowed. `named`: the SEMANTIC techniques allowed, None for all."""

    least: Equivalence
    named: frozenset[str] | None = frozenset()

    def holds(self, equivalence: Equivalence, technique: str) -> bool:
        """Return True if a technique of that equivalence may be used."""
        if equivalence == "SEMANTIC" and self.named is not None and technique not in self.named:
            return False
        return _RANK(equivalence) <= _RANK(self.least)

    def semantic_of(self, names: Iterable[str]) -> list[str]:
        """Filter the names of SEMANTIC techniques: keep the allowed ones."""
        return [name for name in names if self.holds("SEMANTIC", name)]


EVERYTHING = Allowance("SEMANTIC", None)


def allowance(text: str) -> Allowance:
    """Parse `bitwise`, `rounding`, `semantic` or `semantic=NAME,...`, in upper or lower case.

    SEMANTIC includes ROUNDING. Raises `UsageError` for any other text.
    """
    word, given, names = text.partition("=")
    found = next((one for one in EQUIVALENCES if one == word.strip().upper()), None)
    named = frozenset(name.strip().lower() for name in names.split(",") if name.strip())
    if found is None or bool(given) != bool(named) or (given and found != "SEMANTIC"):
        raise UsageError(
            f"--allow {text.lower()}: expected bitwise (every bit stays the same), rounding (sums may be "
            "added in another order) or semantic=NAME,... (the named techniques may compute a different "
            "function, such as semantic=precision). `torchtrim explain NAME` describes a technique."
        )
    if found != "SEMANTIC":
        return Allowance(found)
    return Allowance(found, named if given else None)


def words_for(equivalence: Equivalence, technique: str) -> str:
    """Return the option that allows a technique of that equivalence."""
    least = f"semantic={technique}" if equivalence == "SEMANTIC" else equivalence.lower()
    return f"--allow {least}"


class Terms(NamedTuple):
    """The user's terms for a plan.

    `allow`: what a plan may change, parsed by `allowance`. `exclude`: techniques not to use. `pins`: places
    fixed in every plan (`planner.pins`). `exports`: plan only what can be exported, and run it exported.
    `candidates`: the number of plans to run for a budget; the fastest one wins.
    """

    allow: str = "BITWISE"
    exclude: Collection[str] = ()
    pins: Mapping[str, Sequence[str]] = {}
    exports: bool = False
    candidates: int = 1


BITWISE = Terms()
"""Terms for plans whose results are identical bit for bit."""
