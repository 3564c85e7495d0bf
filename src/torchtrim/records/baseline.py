"""The baseline: what marked tests of a project waited for and needed. Input is not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from torchtrim.records.files import decode, read_bounded, write_atomically

_MOST_BYTES = 2**24


class Level(Struct, frozen=True, kw_only=True):
    """What one test measured: host-device syncs, peak, and the device that both are of."""

    syncs: Annotated[int, Meta(ge=0)]
    peak_bytes: Annotated[int, Meta(ge=0)]
    device: str = ""


class Baseline(Struct, frozen=True, kw_only=True):
    """Levels by the ids of the tests."""

    schema_version: Literal[1] = 1
    tests: dict[str, Level] = {}


def load_baseline(path: Path) -> Mapping[str, Level]:
    """The levels of a file; none where it is missing. Raises `UnreadableInput`, naming the field."""
    if not path.exists():
        return {}
    return decode(read_bounded(path, _MOST_BYTES), Baseline, str(path)).tests


def save_baseline(levels: Mapping[str, Level], path: Path) -> None:
    """Write the levels by id, a line for each field, whole or not at all."""
    tests = {name.encode(errors="replace").decode(): levels[name] for name in sorted(levels)}
    data = msgspec.json.encode(Baseline(tests=tests))
    write_atomically(path, msgspec.json.format(data, indent=2) + b"\n")
