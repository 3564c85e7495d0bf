"""Names of operators that rerun: `Net.mlp:gelu.0` is the first gelu in a call of `Net.mlp`.

Operators of child modules count too. Operators joined by commas rerun together: `Net.mlp:addmm.0,gelu.0`
drops both results. Places name operators by role, so a place is valid on every device.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torchtrim.errors import ApplyFailed
from torchtrim.executor.roles import OperatorOrdinal
from torchtrim.records.operator_names import role_of

_WHERE = re.compile(r"(?P<path>[^:]+):(?P<runs>[\w-]+(\.\d+)?(,[\w-]+(\.\d+)?)*)")


class ReplayPlace(NamedTuple):
    """Operators of a module's calls that rerun together."""

    path: str
    runs: tuple[OperatorOrdinal, ...]

    def __str__(self) -> str:
        return f"{self.path}:{','.join(f'{name}.{ordinal}' for name, ordinal in self.runs)}"


def place_of(where: str) -> ReplayPlace:
    """Return the place that a plan names. Raises `ApplyFailed` if the text is not a place."""
    match = _WHERE.fullmatch(where)
    if match is None:
        raise ApplyFailed(
            f"cannot read {where!r} as a place. Write a module's path and operators of its "
            "calls, each with its ordinal from 0 on, such as Net.blocks.3:gelu.0 or "
            "Net.mlp:addmm.0,gelu.0."
        )
    return ReplayPlace(match["path"], tuple(map(run_of, match["runs"].split(","))))


def run_of(text: str) -> OperatorOrdinal:
    """Read `"gelu.3"`, or a kernel's name as in plans of schema 1. Without a number it is the first."""
    name, _, ordinal = text.partition(".")
    return OperatorOrdinal(role_of(name), int(ordinal or 0))
