"""Parsing and formatting of byte counts and durations."""

from __future__ import annotations

import re
from typing import NamedTuple

from torchtrim.errors import UsageError

_FACTORS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _FACTORS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}
_MOST = 2**62  # Bytes; half the range of a signed 64-bit integer leaves room for sums.
_MOST_SHOWN = 60  # Arbitrary; a quotation of this length fits a line of the terminal.
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*", re.ASCII)


class Amount(NamedTuple):
    """An amount of memory: bytes, or a percentage of a total that is not known yet."""

    number: float
    is_share: bool = False

    def of(self, whole: int) -> int:
        """Return the amount in bytes, resolving a percentage against `whole`."""
        return int(self.number * whole / 100) if self.is_share else int(self.number)


_MORE_DIGITS = 3  # Arbitrary; beyond, whole bytes are as short.
_LEAST_BARE = 2**16  # Arbitrary; no training step needs less, and nobody counts bytes there.


def parse_amount(text: str | int, *, zero: bool = False) -> Amount:
    """Read `"8GiB"`, `"8GB"`, `"1024"`, `1024` or `"60%"`.

    Raises `UsageError` for anything else, for zero unless `zero`, and for more than 4 EiB.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        number, unit = float(max(min(text, 2 * _MOST), -1)), ""
    else:
        match = _AMOUNT.fullmatch(text) if isinstance(text, str) else None
        if match is None or (match[2] != "%" and match[2].lower() not in _FACTORS):
            raise UsageError(
                f"cannot read {_shown(text)} as an amount of memory. Write a number with a unit, "
                "such as 8GiB (8 x 2^30), 500MB (500 x 10^6), 1048576 (bytes), or 60% of the "
                "original's peak."
            )
        unit = match[2].lower()
        number = float(match[1]) * _FACTORS.get(unit, 1)
    if number < 0 or number > _MOST or not (number or zero):
        raise UsageError(
            f"{_shown(text)} is not a usable amount of memory. Give more than zero and less "
            "than 4 EiB."
        )
    return Amount(number, is_share=unit == "%")


def parse_bytes(text: str | int, *, whole: int | None = None, zero: bool = False) -> int:
    """Return the bytes that `parse_amount` reads, resolving `"60%"` against `whole`.

    Raises `UsageError` like `parse_amount`, and for a percentage without `whole`.
    """
    amount = parse_amount(text, zero=zero)
    if amount.is_share and whole is None:
        raise UsageError(
            f"{text!r} is a percentage, but the peak is unknown here. Give bytes, such as 8GiB."
        )
    return amount.of(whole or 0)


def check_bytes(text: str | int, *, share: bool = False, zero: bool = False) -> None:
    """Raise `UsageError` if `parse_bytes` would reject the text. Call it before a long run.

    `share`: accept percentages, since the total will be known later.
    """
    parse_bytes(text, whole=1 if share else None, zero=zero)


def check_unit(text: str) -> None:
    """Raise `UsageError` for a bare number that is too small to be bytes, such as `"60"`."""
    try:
        number = float(text)
    except ValueError:
        return
    if number >= _LEAST_BARE:
        return
    share = 100 * number if number < 1 else number
    meant = f"{number:g}MiB" if share > 100 else f"{share:g}% of the original's peak"
    raise UsageError(
        f"{text} is {counted(int(number), 'byte')}: no step fits into that. Did you mean {meant}, "
        f"or {number:g}GiB?"
    )


def _shown(text: object) -> str:
    shown = repr(text) if not isinstance(text, int) or abs(text) <= _MOST else "that number"
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `"1 finding"` or `"5 findings"`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(amount: int | float, more: int = 0) -> str:
    """Format `1536` as `"1.50 KiB"`, with `more` digits. The sign is kept; below 1 KiB are whole bytes."""
    if abs(amount) < 1024:
        return f"{amount:.0f} B"
    size, unit = float(amount), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        size, unit = size / 1024, larger
        if abs(size) < 1024:
            break
    return f"{_three_digits(size, more)} {unit}"


def format_apart(*amounts: int) -> tuple[str, ...]:
    """Format amounts to compare: different ones that look alike get more digits, or are in bytes."""
    for digits in range(_MORE_DIGITS):
        texts = tuple(format_bytes(amount, digits) for amount in amounts)
        if len({*texts}) == len({*amounts}):
            return texts
    return tuple(f"{amount} B" for amount in amounts)


def format_seconds(seconds: float) -> str:
    """Format `0.0123` as `"12.3 ms"`."""
    if abs(seconds) >= 1:
        return f"{_three_digits(seconds)} s"
    factor, unit = (1e3, "ms") if abs(seconds * 1e3) >= 1 else (1e6, "us")
    return f"{_three_digits(seconds * factor)} {unit}"


def _three_digits(number: float, more: int = 0) -> str:
    return f"{number:.{more + (2 if abs(number) < 10 else 1 if abs(number) < 100 else 0)}f}"
