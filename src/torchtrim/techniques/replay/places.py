"""How a plan writes operators that run again: `Net.mlp:gelu.0` is the first gelu of a call of `Net.mlp`.

All that runs in the call counts, its children's operators too. Operators with a comma between them run again
together: `Net.mlp:addmm.0,gelu.0` drops what both make. Operators go by their roles, so a place holds on
every device.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torchtrim.errors import ApplyFailed
from torchtrim.records.roles import role_of

_WHERE = re.compile(r"(?P<path>[^:]+):(?P<runs>\w+(\.\d+)?(,\w+(\.\d+)?)*)")


class Run(NamedTuple):
    """One operator inside a module call: its role, and its ordinal among operators of that role."""

    name: str
    ordinal: int


class Place(NamedTuple):
    """The operators of a module's calls that run again together."""

    path: str
    runs: tuple[Run, ...]

    def __str__(self) -> str:
        return f"{self.path}:{','.join(f'{name}.{ordinal}' for name, ordinal in self.runs)}"


def place_of(where: str) -> Place:
    """The place that a plan names. Raises `ApplyFailed` for what is none."""
    match = _WHERE.fullmatch(where)
    if match is None:
        raise ApplyFailed(
            f"cannot read {where!r} as a place. Write a module's path and operators of its calls, each "
            "with a number from 0 on, such as Net.blocks.3:gelu.0 or Net.mlp:addmm.0,gelu.0."
        )
    return Place(match["path"], tuple(map(run_of, match["runs"].split(","))))


def run_of(text: str) -> Run:
    """Read `"gelu.3"`, or a kernel's name as plans of schema 1 have it. No number is the first."""
    name, _, ordinal = text.partition(".")
    return Run(role_of(name), int(ordinal or 0))
