"""Records the collectives of a step: bytes, group and duration."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import torch

from torchtrim.dispatch.modes import tensors_among
from torchtrim.records.profile import Collective

_PLAIN, _FUNCTIONAL = "c10d", "_c10d_functional"
_PATIENCE_SECONDS = 5.0
"""Arbitrary: far longer than a backend thread takes to report, and shorter than a timeout."""


@dataclass
class _Seen:
    """A collective. `end_ns` is 0 until it is done; if `tells`, a backend thread sets it."""

    name: str
    operator: int
    group: str
    ranks: int
    bytes: int
    begin_ns: int
    end_ns: int = 0
    tells: bool = False


def is_collective(func: Any) -> bool:
    """Return True for operators of `torch.distributed`."""
    return getattr(func, "namespace", "") in (_PLAIN, _FUNCTIONAL)


class Collectives:
    """The collectives of one step, in the order this rank issues them."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._open: dict[int, _Seen] = {}

    def ran(self, operator: int, func: Any, args: Any, result: Any, span: tuple[int, int]) -> None:
        """Record a collective that returned; it may still be in flight."""
        if "wait_tensor" in str(func):
            for tensor in tensors_among(args):
                waited = self._open.pop(tensor.untyped_storage()._cdata, None)
                if waited is not None:
                    waited.end_ns = span[1]
            return
        group, ranks = _group_of(args)
        name = func.overloadpacket.__name__.strip("_")
        sizes = (sum(t.numel() * t.element_size() for t in tensors_among((one,))) for one in args)
        seen = _Seen(name, operator, group, ranks, max(sizes, default=0), span[0])
        self._seen.append(seen)
        if func.namespace == _FUNCTIONAL:
            outputs = tensors_among((result,))
            self._open |= {tensor.untyped_storage()._cdata: seen for tensor in outputs}
            return

        def over(_: Any) -> None:
            seen.end_ns = time.perf_counter_ns()

        # The backend reports the end of its work if the work has a future.
        work = result[-1] if isinstance(result, (tuple, list)) and result else result
        with contextlib.suppress(RuntimeError, TypeError, AttributeError):
            torch._C._distributed_c10d.Work.unbox(work).get_future().add_done_callback(over)
            seen.tells = True

    def records(self, start_ns: int) -> list[Collective]:
        """Wait for backend threads to finish and return the records, with times from the step's start on."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while any(one.tells and not one.end_ns for one in self._seen):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        return [
            Collective(
                seen.name,
                seen.operator,
                seen.group,
                seen.ranks,
                seen.bytes,
                max(seen.begin_ns - start_ns, 0) / 1e9,
                max(seen.end_ns - seen.begin_ns, 0) / 1e9 if seen.end_ns else None,
            )
            for seen in self._seen
        ]


def _group_of(args: Any) -> tuple[str, int]:
    """Return the process group's name and size from the arguments; size 0 if unknown."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError, AttributeError):
                group = torch._C._distributed_c10d.ProcessGroup.unbox(value)
                return str(group.group_name), int(group.size())
    named = [value for value in args if isinstance(value, str)]
    return (named[-1], 0) if named else ("", 0)
