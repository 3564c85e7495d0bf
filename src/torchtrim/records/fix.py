"""What became of the fixes of a script's host-device syncs: applied, suggested, refused or reverted."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.certificate import Certificate
from torchtrim.records.finding import Equivalence

State = Literal["applied", "suggested", "refused", "reverted"]


class FixRecord(Struct, frozen=True, kw_only=True):
    """One fix at one place. `line` is that of the file as it was found; `diff` is from the round before.

    `syncs_before` and `syncs_after` are counted in a step, at what was written anew; the second is
    null where it was not run. `reason` says why it was not applied; of one that was it is empty.
    """

    name: str
    path: str
    line: int
    state: State
    equivalence: Equivalence
    syncs_before: Annotated[int, Meta(ge=0)] = 0
    syncs_after: Annotated[int, Meta(ge=0)] | None = None
    diff: str = ""
    reason: str = ""


class Fixes(Struct, frozen=True, kw_only=True):
    """The fixes of a script's source, together: how many host-device syncs its step has in the user's
    own source, and the proof.

    `diff` is of all that were applied, from the project's folder; `written` says whether the files have it.
    `certificate` compares the script with the diff to the script without; null where none was applied.
    """

    places: tuple[FixRecord, ...]
    syncs_before: Annotated[int, Meta(ge=0)]
    syncs_after: Annotated[int, Meta(ge=0)]
    diff: str = ""
    written: bool = False
    certificate: Certificate | None = None
