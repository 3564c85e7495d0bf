"""What a row of the table of waits is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Ask(Protocol):
    """An operator that is about to run, or has just run. Tensors are duck-typed: `dtype`, `shape`, `dim()`.

    `args` are by the names of the operator's schema, defaults included. `is_on_device` and `is_pinned`
    are of the logical device and memory, which on an emulated accelerator are not those of the tensor's
    own storage. `result` is what it returned.
    """

    @property
    def name(self) -> str: ...

    @property
    def args(self) -> Mapping[str, Any]: ...

    @property
    def result(self) -> Any: ...

    @property
    def is_on_device(self) -> Callable[[Any], bool]: ...

    @property
    def is_pinned(self) -> Callable[[Any], bool]: ...


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A line of public source that waits: `repository` at `ref`, `path`, and `line`.

    `note` says in our own words why the line waits.
    """

    repository: str
    ref: str
    path: str
    line: int
    note: str

    @property
    def url(self) -> str:
        """Where to read it."""
        return f"https://github.com/{self.repository}/blob/{self.ref}/{self.path}#L{self.line}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of host-device sync.

    `operators` are the names, with their overloads or without (`"aten::nonzero"`), that the row is asked
    about; empty for a call that is no operator. `waits` tells from the arguments how often the operator
    waits; an operator that several rows know waits as often as they say together. `when` says the same
    to a person. `since` and `until` are torch versions, `until` excluded; `""` is open. `code` is the
    rule that reports it.
    """

    name: str
    code: str
    what: str
    when: str
    operators: tuple[str, ...]
    waits: Callable[[Ask], int]
    evidence: tuple[Evidence, ...]
    advice: str
    since: str = ""
    until: str = ""
