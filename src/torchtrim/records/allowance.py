"""What a plan may change: nothing, the order of additions, or, by name, the function itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torchtrim.errors import UsageError
from torchtrim.records.finding import EQUIVALENCES, Equivalence

_RANK = EQUIVALENCES.index


class Allowance(NamedTuple):
    """`least`: the least equal that a plan may be. `named`: the SEMANTIC techniques that may be used, None
    for all of them."""

    least: Equivalence
    named: frozenset[str] | None = frozenset()

    def holds(self, equivalence: Equivalence, technique: str) -> bool:
        """Whether a technique of that equivalence may be used."""
        if equivalence == "SEMANTIC" and self.named is not None and technique not in self.named:
            return False
        return _RANK(equivalence) <= _RANK(self.least)

    def semantic_of(self, names: Iterable[str]) -> list[str]:
        """Of these techniques, which make another function, those that may be used."""
        return [name for name in names if self.holds("SEMANTIC", name)]


EVERYTHING = Allowance("SEMANTIC", None)


def allowance(text: str) -> Allowance:
    """Of `bitwise`, `rounding`, `semantic` or `semantic=NAME,...`, in either case.

    What is SEMANTIC may round too. Raises `UsageError` for other words.
    """
    word, given, names = text.partition("=")
    found = next((one for one in EQUIVALENCES if one == word.strip().upper()), None)
    named = frozenset(name.strip().lower() for name in names.split(",") if name.strip())
    if found is None or bool(given) != bool(named) or (given and found != "SEMANTIC"):
        raise UsageError(
            f"--allow {text.lower()}: it is bitwise, where every bit stays; rounding, where sums may be "
            "added up in another order; or semantic=NAME,..., which lets these techniques make another "
            "function, such as semantic=precision. `torchtrim explain NAME` says what one does."
        )
    if found != "SEMANTIC":
        return Allowance(found)
    return Allowance(found, named if given else None)


def words_for(equivalence: Equivalence, technique: str) -> str:
    """What a person gives so that a technique of that equivalence may be used."""
    least = f"semantic={technique}" if equivalence == "SEMANTIC" else equivalence.lower()
    return f"--allow {least}"
