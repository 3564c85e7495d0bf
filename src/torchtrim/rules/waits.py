"""What the rules on waiting for the device share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from torchtrim.memory.names import base_name
from torchtrim.records.finding import Cure, Finding
from torchtrim.records.profile import Operator, Profile, TensorUse
from torchtrim.rules.places import Line, by_line


def on_host(profile: Profile, use: TensorUse) -> bool:
    """Whether a tensor lives in the host's memory, where reading it waits for nothing."""
    return profile.storages[use.storage].device.startswith("cpu")


def waiting_lines(
    profile: Profile, waits: Callable[[Profile, Operator], bool]
) -> Iterable[tuple[Line, list[int]]]:
    """Operators that wait for the device, by line. A step on the CPU waits for none."""
    if profile.device.startswith("cpu"):
        return ()
    found = (i for i, op in enumerate(profile.operators) if waits(profile, op))
    return by_line(profile, found).items()


def waiting_finding(
    profile: Profile, code: str, line: Line, operators: Sequence[int], *, what: str, advice: str
) -> Finding:
    """A finding for the waits of one line. Only a real device measures what they cost."""
    measured = not profile.device.startswith("emulated")
    seconds = sum(profile.operators[i].seconds for i in operators)
    cost = f", {seconds * 1e3:.3g} ms in all" if measured else ""
    return Finding(
        code=code,
        path=line.path,
        line=line.line,
        end_line=line.line,
        message=f"{what}: the host waits for the device {_times(len(operators))} a step{cost} "
        f"({', '.join(_counted(profile, operators))})",
        count_per_step=len(operators),
        price_ms=seconds * 1e3 if measured else None,
        source="measured" if measured else "modelled",
        cure=Cure(kind="advice", reason=advice),
    )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _counted(profile: Profile, operators: Sequence[int]) -> Iterator[str]:
    """`aten::index`, `2 x aten::index_put in backward`."""
    counts = Counter(
        (base_name(op.name), " in backward" if op.phase == "backward" else "")
        for op in (profile.operators[i] for i in operators)
    )
    for (name, phase), count in counts.items():
        yield f"{f'{count} x ' if count > 1 else ''}{name}{phase}"
