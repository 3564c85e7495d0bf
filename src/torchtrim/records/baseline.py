"""The baseline: host-device syncs and peaks of a project's marked tests. The file is untrusted input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from torchtrim.records.files import decode, read_bounded, write_atomically

_MOST_BYTES = 2**24  # Arbitrary; bounds what a hostile file makes us read.


class Level(Struct, frozen=True, kw_only=True):
    """Measurements of one test: host-device syncs, peak, and the device it ran on."""

    syncs: Annotated[int, Meta(ge=0)]
    peak_bytes: Annotated[int, Meta(ge=0)]
    device: str = ""


class Baseline(Struct, frozen=True, kw_only=True):
    """Levels by test id."""

    schema_version: Literal[1] = 1
    tests: dict[str, Level] = {}


def load_baseline(path: Path) -> Mapping[str, Level]:
    """Load the levels of a file; empty if it is missing. Raises `UnreadableInput`, naming the field."""
    if not path.exists():
        return {}
    return decode(read_bounded(path, _MOST_BYTES), Baseline, str(path)).tests


def save_baseline(levels: Mapping[str, Level], path: Path) -> None:
    """Write the levels, sorted by id with a line per field, atomically."""
    tests = {name.encode(errors="replace").decode(): levels[name] for name in sorted(levels)}
    data = msgspec.json.encode(Baseline(tests=tests))
    write_atomically(path, msgspec.json.format(data, indent=2) + b"\n")
