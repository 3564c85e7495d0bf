"""Settings of PyTorch's CUDA caching allocator, as `PYTORCH_CUDA_ALLOC_CONF` gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtrim.errors import UsageError

_MIB = 2**20
UNIT = 512  # kMinBlockSize of CUDACachingAllocator.cpp.
LARGE_SEGMENT = 20 * _MIB  # kLargeBuffer.
_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: from 1 MiB to 32 GiB, by powers of two.
_ITEM = re.compile(r"\s*([a-z0-9_]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)\s*(?:,|$)")
_IGNORED = {"backend", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse"}
"""Settings that do not change the address of a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """Settings that decide where blocks lie. The defaults are PyTorch's.

    `max_split_size`, `max_non_split_rounding`: bytes. `roundup_divisions`: for each power of two from 1 MiB
    on, into how many steps a size is rounded up; 1 means by 512 bytes. `garbage_collection_threshold`: a
    share of the memory that the process may use, 0 without collection.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    roundup_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0

    def rounded(self, size: int) -> int:
        """Return the bytes that the allocator takes for a request."""
        if size < UNIT:
            return UNIT
        divisions = self._divisions(size)
        if divisions > 1 and size > UNIT * divisions:
            return _next_division(size, divisions)
        return -(-size // UNIT) * UNIT

    def _divisions(self, size: int) -> int:
        if not self.roundup_divisions:
            return 1
        interval = min(max(size.bit_length() - _MIB.bit_length(), 0), _INTERVALS - 1)
        return self.roundup_divisions[interval]

    def words(self) -> str:
        """Return the settings as `PYTORCH_CUDA_ALLOC_CONF` takes them; empty for the defaults."""
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_size is not None:
            parts.append(f"max_split_size_mb:{self.max_split_size // _MIB}")
        if self.max_non_split_rounding != LARGE_SEGMENT:
            parts.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding // _MIB}")
        if self.roundup_divisions:
            parts.append(f"roundup_power2_divisions:{_divisions_words(self.roundup_divisions)}")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold:g}")
        return ",".join(parts)


def parse_settings(text: str) -> AllocatorSettings:
    """Read the value of `PYTORCH_CUDA_ALLOC_CONF`. Raises `UsageError` for an unknown setting."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text.rstrip()):
        match = _ITEM.match(text, at)
        if match is None:
            raise UsageError(
                f"cannot read the allocator's setting at {text[at : at + 40]!r}. "
                "Write it as in PYTORCH_CUDA_ALLOC_CONF: name:value,name:value."
            )
        found[match[1]] = match[2].strip()
        at = match.end()
    return _settings(found)


def _settings(found: dict[str, str]) -> AllocatorSettings:
    known = {
        "expandable_segments",
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "roundup_power2_divisions",
        "garbage_collection_threshold",
    }
    for name in found:
        if name not in known and name not in _IGNORED and not name.startswith("pinned_"):
            raise UsageError(
                f"the allocator has no setting {name!r} that is modelled here. "
                f"There are {', '.join(sorted(known))}."
            )
    split = found.get("max_split_size_mb")
    rounding = found.get("max_non_split_rounding_mb")
    return AllocatorSettings(
        expandable_segments=found.get("expandable_segments", "False") == "True",
        max_split_size=None if split is None else _mebibytes("max_split_size_mb", split),
        max_non_split_rounding=LARGE_SEGMENT
        if rounding is None
        else _mebibytes("max_non_split_rounding_mb", rounding),
        roundup_divisions=_read_divisions(found.get("roundup_power2_divisions", "")),
        garbage_collection_threshold=_share(found.get("garbage_collection_threshold", "0")),
    )


def _mebibytes(name: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or int(text) * _MIB <= LARGE_SEGMENT:
        raise UsageError(f"{name} is {text!r}: PyTorch takes a whole number of MiB above 20.")
    return int(text) * _MIB


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise UsageError(
            f"garbage_collection_threshold is {text!r}: it is a share, 0.8 for example."
        )
    return share


def _read_divisions(text: str) -> tuple[int, ...]:
    """Read `4`, or `[256:1,512:2,>:8]`: the MiB where each number of divisions begins."""
    if not text:
        return ()
    if not text.startswith("["):
        return (_power_of_two(text, text),) * _INTERVALS
    divisions = [1] * _INTERVALS
    last, first = 0, True
    for item in text.strip("[]").split(","):
        key, _, value = item.partition(":")
        count = _power_of_two(value.strip(), text)
        if key.strip() == ">":
            divisions[last + 1 :] = [count] * (_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(key.strip(), text).bit_length() - 1, _INTERVALS - 1)
        if first:
            divisions[:last] = [count] * last
        divisions[last], first = count, False
    return tuple(divisions)


def _power_of_two(number: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", number) or int(number).bit_count() != 1:
        raise UsageError(f"roundup_power2_divisions is {text!r}: {number!r} is not a power of two.")
    return int(number)


def _divisions_words(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1:
        return str(divisions[0])
    return "[" + ",".join(f"{2**at}:{count}" for at, count in enumerate(divisions)) + "]"


def _next_division(size: int, divisions: int) -> int:
    """Round up to the next of the steps that divide the distance between two powers of two."""
    if size.bit_count() == 1:
        return size
    floor = 1 << (size.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-size // step) * step
