"""What became of the cures of a script's waits: made, offered, refused or taken back."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.certificate import Certificate
from torchtrim.records.finding import Equivalence

State = Literal["made", "offered", "refused", "taken back"]


class FixRecord(Struct, frozen=True, kw_only=True):
    """One cure at one place. `line` is that of the file as it was found; `diff` is from the round before.

    `waits_before` and `waits_after` are counted in a step, at what was written anew; the second is
    null where it was not run. `reason` says why it was not made; of one that was made it is empty.
    """

    cure: str
    path: str
    line: int
    state: State
    equivalence: Equivalence
    waits_before: Annotated[int, Meta(ge=0)] = 0
    waits_after: Annotated[int, Meta(ge=0)] | None = None
    diff: str = ""
    reason: str = ""


class Cures(Struct, frozen=True, kw_only=True):
    """The cures of a script's source, together: how often its step waits in the user's own source, and
    the proof.

    `diff` is of all that were made, from the project's folder; `written` says whether the files have it.
    `certificate` compares the script with the diff to the script without; null where none was made.
    """

    fixes: tuple[FixRecord, ...]
    waits_before: Annotated[int, Meta(ge=0)]
    waits_after: Annotated[int, Meta(ge=0)]
    diff: str = ""
    written: bool = False
    certificate: Certificate | None = None
