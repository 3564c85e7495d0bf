"""The values of expressions in user code when they ran: the evidence for a fix."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Spot = tuple[int, int, int, int]
"""The span of an expression: first line, first byte in it, last line, byte after its end."""


class Seen(Struct, frozen=True, kw_only=True):
    """One value. `kind` is `"tensor"`, or the name of its Python type.

    Of a tensor: type, device, shape, and for a boolean one the share that is true. `storage` numbers
    its storage, within one execution. Of a Python number or string, `value` is its `repr`.
    """

    kind: str
    dtype: str = ""
    device: str = ""
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    leaf: bool = True
    storage: int = -1
    share: float | None = None
    value: str = ""


class Execution(Struct, frozen=True, kw_only=True):
    """Values that were seen together, and how often. `grad`: whether gradients were recorded."""

    values: dict[str, Seen]
    grad: bool
    count: Annotated[int, Meta(ge=1)] = 1


class Probe(Struct, frozen=True, kw_only=True):
    """Expressions of one file to look at together, by name."""

    number: int
    path: str
    parts: dict[str, Spot]


class Observed(Struct, frozen=True, kw_only=True):
    """What a probe saw. `capped`: there were more different executions than are kept."""

    number: int
    executions: tuple[Execution, ...] = ()
    capped: bool = False
