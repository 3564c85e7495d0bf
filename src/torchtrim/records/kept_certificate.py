"""A certificate as a file: both programs, where and with what, so that it can be repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from torchtrim.records.certificate import Certificate
from torchtrim.records.files import decode, read_bounded, write_atomically
from torchtrim.records.plan import Plan
from torchtrim.records.report import Figures

_MOST_BYTES = 2**24


class Program(Struct, frozen=True, kw_only=True):
    """A script or a module with its arguments; `sha256` of a script's text, empty for a module.

    `processes`: as how many ranks it ran.
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    sha256: str = ""
    processes: int = 1


class KeptCertificate(Struct, frozen=True, kw_only=True):
    """A certificate with all that repeating it needs.

    `other` is the second program, or `plan` what the first was run with. `results` is a digest of all that
    the original computed, after the number of the way in which it is made. `machine` names the system, the
    cores and the threads of torch, `made` the day.
    """

    schema_version: Literal[1] = 1
    certificate: Certificate
    original: Program
    other: Program | None = None
    plan: Plan | None = None
    steps: int = 3
    warmup: int = 1
    device: str | None = None
    torchtrim: str = ""
    torch: str = ""
    python: str = ""
    machine: str = ""
    made: str = ""
    results: str = ""
    before: Figures | None = None
    after: Figures | None = None


def load_certificate(path: Path) -> KeptCertificate:
    """Load a certificate. Raises `UnreadableInput`, naming the field, for anything else."""
    return decode(read_bounded(path, _MOST_BYTES), KeptCertificate, str(path), name="certificate")


def save_certificate(kept: KeptCertificate, path: Path) -> None:
    """Write it with a line for each field, whole or not at all."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
