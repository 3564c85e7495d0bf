"""Reads plain data out of a pickle without running it: dicts, lists, tuples, texts and numbers alone.

The format is described in CPython's Lib/pickletools.py. Any opcode that could name, call or build an object
is refused, so a file of anybody's can be read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from torchtrim.errors import UnreadableInput

_MOST_CONTAINERS = (
    20_000_000  # Some hundred times a large snapshot; bounds the memory of a hostile file.
)
_MOST_DIGITS = 16  # Bytes of an integer: addresses take 8.
_NAMES = {
    b"c": "GLOBAL",
    b"\x93": "STACK_GLOBAL",
    b"R": "REDUCE",
    b"b": "BUILD",
    b"i": "INST",
    b"o": "OBJ",
    b"\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX",
    b"P": "PERSID",
    b"Q": "BINPERSID",
    b"\x82": "EXT1",
    b"\x83": "EXT2",
    b"\x84": "EXT4",
}
"""What would name, call or build an object."""
_COUNTS = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_FIXED: dict[bytes, Any] = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
_PACKED = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
_LENGTHS = {
    **dict.fromkeys((b"\x8c", b"C", b"\x8a"), "<B"),
    **dict.fromkeys((b"X", b"B", b"\x8b"), "<I"),
    **dict.fromkeys((b"\x8d", b"\x8e"), "<Q"),
}
_TEXTS, _INTEGERS = {b"\x8c", b"X", b"\x8d"}, {b"\x8a", b"\x8b"}
_READS = {b"h": "<B", b"j": "<I"}
_WRITES = {b"q": "<B", b"r": "<I"}
_SKIPPED = {b"\x80": 1, b"\x95": 8}
_STOP = ord(".")
_MARK = object()


def load_plain(data: bytes, name: str) -> Any:
    """Return the value in a pickle of plain data. `name` names the file in errors.

    Raises `UnreadableInput` for a pickle with anything else, one that is damaged or cut off, and data in
    another format.
    """
    if not data.startswith(b"\x80"):
        raise UnreadableInput(
            f"{name} is not a memory snapshot: it does not begin as a pickle does. "
            "Write one with torch.cuda.memory._dump_snapshot(FILE)."
        )
    return _Machine(data, name).run()


class _Machine:
    """The stack machine of pickles, for plain data."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data, self._name, self._at = data, name, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._containers = 0

    def run(self) -> Any:
        """Run until the end and return the one value."""
        data, steps, size = self._data, self._steps(), len(self._data)
        while self._at < size:
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                return self._only()
            if (step := steps.get(code)) is None:
                self._refuse(bytes((code,)))
            step()
        self._fail("it is cut off")

    def _steps(self) -> dict[int, Callable[[], object]]:
        """Return what each opcode does."""
        steps: dict[bytes, Callable[[], object]] = {
            b"(": partial(self._push, _MARK),
            b"\x94": self._memoize,
            b"}": lambda: self._made({}),
            b"]": lambda: self._made([]),
            b"t": lambda: self._made(tuple(self._since_mark())),
            b"u": lambda: self._set(self._since_mark()),
            b"s": lambda: self._set(self._last(2)),
            b"e": lambda: self._append(self._since_mark()),
            b"a": lambda: self._append(self._last(1)),
        }
        steps |= {code: partial(self._push, value) for code, value in _FIXED.items()}
        steps |= {code: partial(self._push_number, form) for code, form in _PACKED.items()}
        steps |= {code: partial(self._recall, form) for code, form in _READS.items()}
        steps |= {code: partial(self._remember, form) for code, form in _WRITES.items()}
        steps |= {code: partial(self._push_tuple, count) for code, count in _COUNTS.items()}
        steps |= {code: partial(self._take, count) for code, count in _SKIPPED.items()}
        steps |= {code: partial(self._push_sized, code) for code in _LENGTHS}
        return {ord(code): step for code, step in steps.items()}

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_number(self, form: str) -> None:
        self._stack.append(self._number(form))

    def _push_tuple(self, count: int) -> None:
        self._made(tuple(self._last(count)))

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._top()

    def _remember(self, form: str) -> None:
        self._memo[self._number(form)] = self._top()

    def _take(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) < count:
            self._fail("it is cut off")
        self._at += count
        return piece

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return number

    def _push_sized(self, code: bytes) -> None:
        length = self._number(_LENGTHS[code])
        if code in _INTEGERS and length > _MOST_DIGITS:
            self._fail(f"it holds an integer of {length} bytes")
        piece = self._take(length)
        if code in _INTEGERS:
            self._stack.append(int.from_bytes(piece, "little", signed=True))
        else:
            self._stack.append(str(piece, "utf-8", "replace") if code in _TEXTS else piece)

    def _recall(self, form: str) -> None:
        index = self._number(form)
        if index not in self._memo:
            self._fail(f"it refers to value {index}, which it does not hold")
        self._stack.append(self._memo[index])

    def _top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            self._fail("a value is missing")
        return self._stack[-1]

    def _last(self, count: int) -> list[Any]:
        """Pop the last values; a mark among them is an error."""
        if len(self._stack) < count:
            self._fail("a value is missing")
        items = self._stack[-count:]
        if any(item is _MARK for item in items):
            self._fail("a value is missing")
        del self._stack[-count:]
        return items

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _MARK:
                items = stack[at + 1 :]
                del stack[at:]
                return items
        self._fail("a mark is missing")

    def _set(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            self._fail("keys and values do not pair up")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int)):
                self._fail(f"a key is a {type(key).__name__}")
            target[key] = value

    def _append(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, list):
            self._fail("items are appended to something that is not a list")
        target.extend(items)

    def _made(self, container: Any) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            self._fail(f"it holds more than {_MOST_CONTAINERS:,} lists and dicts")
        self._stack.append(container)

    def _only(self) -> Any:
        if len(self._stack) != 1:
            self._fail("it ends before its value is complete")
        return self._top()

    def _refuse(self, code: bytes) -> NoReturn:
        if code in _NAMES:
            raise UnreadableInput(
                f"{self._name} is not plain data: at byte {self._at - 1} it would "
                f"create an object ({_NAMES[code]}). Nothing of it was run. "
                "A memory snapshot holds dicts, lists, texts and numbers alone."
            )
        self._fail(f"opcode {code!r} is unknown")

    def _fail(self, why: str) -> NoReturn:
        raise UnreadableInput(
            f"{self._name} is damaged: {why}, at byte {self._at}. "
            "Copy it again, or write it again with torch.cuda.memory._dump_snapshot."
        )
