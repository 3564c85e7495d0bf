"""The type of a row in the sync table, and predicates on operator arguments for its `waits`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple


class Ask(NamedTuple):
    """An operator that is about to run, or has just run. Tensors are duck-typed: `dtype`, `shape`, `dim()`.

    `args` maps the names of the operator's schema to arguments, defaults included. `is_on_device` and
    `is_pinned` refer to the logical device and memory; on an emulated accelerator, the tensor's own storage
    is elsewhere. `result` is the operator's output.
    """

    name: str
    args: Mapping[str, Any]
    result: Any
    is_on_device: Callable[[Any], bool]
    is_pinned: Callable[[Any], bool]


@dataclass(frozen=True, kw_only=True)
class Citation:
    """A line of public source that synchronizes: `repository` at `ref`, `path`, and `line`.

    `note` explains in our own words why.
    """

    repository: str
    ref: str
    path: str
    line: int
    note: str

    @property
    def url(self) -> str:
        """The line's address."""
        return f"https://github.com/{self.repository}/blob/{self.ref}/{self.path}#L{self.line}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of host-device sync.

    `operators` are the names that the row applies to, with or without overloads (`"aten::nonzero"`); empty
    for a call that is not an operator. `waits` counts an operator's syncs, given its arguments; the counts of
    several rows for one operator are added. `when` explains the count to people. `since` and `until` are
    torch versions, `until` excluded; `""` is open. `code` is the rule that reports it.
    """

    name: str
    code: str
    what: str
    when: str
    evidence: tuple[Citation, ...]
    advice: str
    operators: tuple[str, ...] = ()
    waits: Callable[[Ask], int] = lambda ask: 0
    since: str = ""
    until: str = ""


SYNC_CODES = {
    "TT101": "a tensor's value is read on the host",
    "TT102": "a shape depends on the data",
    "TT103": "a copy to the device blocks the host",
    "TT104": "the program synchronizes explicitly",
}
"""Codes of syncs, and what each means. TT105 is about races, which do not synchronize."""

TT101 = partial(Row, code="TT101")
TT102 = partial(Row, code="TT102")
TT103 = partial(Row, code="TT103")


REPOSITORY = "pytorch/pytorch"
REF = "v2.12.1"


def pytorch(path: str, line: int, note: str, ref: str = REF) -> Citation:
    """Cite a line of PyTorch."""
    return Citation(repository=REPOSITORY, ref=ref, path=path, line=line, note=note)


def native(path: str, line: int, note: str) -> Citation:
    """Cite a line of an operator's implementation, by its path in ATen's `native` folder."""
    return pytorch(f"aten/src/ATen/native/{path}", line, note)


def is_tensor(value: Any) -> bool:
    """Return True for a tensor, recognized by its attributes."""
    return hasattr(value, "dtype") and hasattr(value, "numel")


def on_device(ask: Ask, value: Any) -> bool:
    """Return True for a tensor on the device."""
    return is_tensor(value) and ask.is_on_device(value)


def on_host(ask: Ask, value: Any) -> bool:
    """Return True for a tensor in host memory."""
    return is_tensor(value) and not ask.is_on_device(value)


def is_mask(tensor: Any) -> bool:
    """Return True if an index tensor is a mask rather than a list of positions."""
    return str(tensor.dtype) in ("torch.bool", "torch.uint8")


def number_on_device(ask: Ask, names: Iterable[str]) -> int:
    """Count the arguments that are tensors on the device."""
    return sum(on_device(ask, ask.args.get(name)) for name in names)


def device(*names: str, times: int = 1) -> Callable[[Ask], int]:
    """Count one sync, or `times`, if any of the arguments is on the device."""
    return lambda ask: times * (number_on_device(ask, names) > 0)


def filled(*names: str, times: int = 1) -> Callable[[Ask], int]:
    """Like `device`, for operators that skip tensors without elements."""
    return lambda ask: (
        times
        * any(on_device(ask, ask.args.get(name)) and ask.args[name].numel() > 0 for name in names)
    )


def apart(on: str, off: str, *, skips: bool = False) -> Callable[[Ask], int]:
    """Count one sync if the first argument is on the device and the second on the host.

    `skips`: not if the second is empty.
    """

    def waits(ask: Ask) -> int:
        host = ask.args[off]
        moves = on_device(ask, ask.args[on]) and on_host(ask, host)
        return int(moves and not (skips and host.numel() == 0))

    return waits


def each_device(*names: str) -> Callable[[Ask], int]:
    """Count one sync for each argument on the device."""
    return lambda ask: number_on_device(ask, names)


def is_dense(tensor: Any) -> bool:
    """Return True if a tensor's elements fill its memory without gaps or overlap, in any order of
    dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
