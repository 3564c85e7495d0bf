"""Values that expressions in user code had when they ran: the evidence for a fix."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

SourceSpan = tuple[int, int, int, int]
"""The span of an expression: first line, byte offset in it, last line, byte offset after its end."""


class ObservedValue(Struct, frozen=True, kw_only=True):
    """One value. `kind` is `"tensor"`, or the name of its Python type.

    For a tensor: its type, device and shape, and for a boolean tensor the `share` of true elements. `storage`
    identifies its storage within one execution. For a Python number or string, `value` is its `repr`.
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
    """Values observed together, and how often. `grad`: gradients were enabled."""

    values: dict[str, ObservedValue]
    grad: bool
    count: Annotated[int, Meta(ge=1)] = 1


class Probe(Struct, frozen=True, kw_only=True):
    """Expressions of one file to observe together, by name."""

    number: int
    path: str
    parts: dict[str, SourceSpan]


class ProbeResult(Struct, frozen=True, kw_only=True):
    """The executions a probe observed. `capped`: there were more distinct executions than it keeps."""

    number: int
    executions: tuple[Execution, ...] = ()
    capped: bool = False
