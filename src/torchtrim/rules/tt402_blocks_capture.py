"""A line keeps the step from being captured in a CUDA graph.

## What it does

Finds code that a CUDA graph cannot capture, or would replay wrongly: host-device syncs, copies from
host memory, host numbers that would keep their captured values, random generators unknown to the
graph, optimizers that count their steps on the host, collectives, and operators whose source was not
read. It runs only on request: `torchtrim diagnose --capture`. It does not need a GPU.

## Why is this bad?

A captured step is launched with one call, so a step of many small kernels is no longer host-bound.
One line that synchronizes ends the capture with an error; one that reads host memory replays the
values from the time of the capture, without a warning.

## Example

```python
for images, labels in loader:
    images = images.to("cuda")
    loss = step(images, labels)
    total += loss.item()
```

## Use instead

```python
static = torch.empty(batch, 3, 224, 224, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step(static)
for images, labels in loader:
    static.copy_(images, non_blocking=True)
    graph.replay()
    total += loss.detach()
```

## Fix safety

A replay runs the same kernels on the same addresses: shapes stay, and so does every Python number
in the step, such as a learning rate. Prove a captured step like any other change, with several
batches: `torchtrim verify`.

## References

* [CUDA semantics: CUDA graphs, constraints](https://pytorch.org/docs/stable/notes/cuda.html#constraints)
* [CUDA programming guide: prohibited and unhandled operations](https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#prohibited-and-unhandled-operations)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.analysis.syncs import (
    CODES,
    code_of,
    inside_libraries,
    library_place,
    library_place_of,
    line_of_sync,
    times,
)
from torchtrim.analysis.user_source import CodeLine, SourceLines, line_of
from torchtrim.records.finding import Finding
from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Place, Profile
from torchtrim.rules.base import Rule
from torchtrim.syncs.explicit import is_unknown
from torchtrim.syncs.lookup import row

_COPIES = frozenset(("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_", "aten::copy"))
_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::")
_STATEMENT = 4  # Arbitrary: lines of a call that may contain `generator=`.


class Obstacle(NamedTuple):
    """A reason why the step cannot be captured, and what to do about it."""

    kind: str
    what: str
    advice: str


_UPLOAD = Obstacle(
    "host memory",
    "copies from host memory, and a replay copies the contents of the same address",
    "copy into a tensor that stays on the device, before the replay",
)
_NUMBER = Obstacle(
    "host number",
    "computes with a tensor on the host, whose number stays as captured",
    "keep the number in a tensor on the device, and write to it before the replay",
)
_STEPS = Obstacle(
    "optimizer",
    "the optimizer counts its steps on the host, which a replay does not",
    "create it with capturable=True",
)
_GENERATOR = Obstacle(
    "generator",
    "draws from its own generator, which the graph does not know",
    "register it: graph.register_generator_state(generator), or draw from the device's own generator",
)
_COLLECTIVE = Obstacle(
    "collective",
    "a collective: NCCL's can be captured after warm-up, other backends' cannot",
    "run 11 steps before the capture, and capture with NCCL 2.9.6 or newer on all ranks alike",
)


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each line and kind of obstacle."""
    lines: dict[tuple[CodeLine, Obstacle], list[Place | None]] = defaultdict(list)
    waiting = set()
    for sync in profile.syncs:
        if code_of(sync.row) in CODES:
            waiting.add(sync.operator)
            known = row(sync.row)
            obstacle = Obstacle("sync", f"waits for the device ({known.what})", known.advice)
            lines[line_of_sync(profile, sync), obstacle].append(library_place(profile, sync))
    obstacles = _Obstacles(profile)
    for number, op in enumerate(profile.operators):
        if number not in waiting and (blocked := obstacles.of(number, op)) is not None:
            lines[line_of(profile, number), blocked].append(library_place_of(profile, number))
    for (line, obstacle), places in lines.items():
        yield _finding(line, obstacle, places)


class _Obstacles:
    """Finds the obstacle of each operator."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._source = SourceLines(profile.project)
        self._on_device = [not storage.device.startswith("cpu") for storage in profile.storages]

    def of(self, number: int, op: Operator) -> Obstacle | None:
        if op.name.startswith(_COLLECTIVES):
            return _COLLECTIVE
        written = {*op.mutates, *(use.storage for use in op.outputs)}
        sides = {self._on_device[use.storage] for use in (*op.inputs, *op.outputs)}
        if sides == {False}:
            kinds = {self._profile.storages[storage].kind for storage in written}
            counts = op.phase == "optimizer" and "optimizer_state" in kinds
            return _STEPS if counts and any(self._on_device) else None
        if sides == {True}:
            if is_unknown(op.name):
                what = f"`{base_name(op.name)}`, whose source was not read, so it may not be capturable"
                return Obstacle("unknown", what, "capture it alone on a GPU to see")
            return _GENERATOR if op.random and self._has_generator(number) else None
        if sides and any(not self._on_device[use.storage] for use in op.inputs):
            if base_name(op.name) not in _COPIES:
                return _NUMBER
            return _UPLOAD if any(self._on_device[storage] for storage in written) else None
        return None

    def _has_generator(self, number: int) -> bool:
        line = line_of(self._profile, number)
        return any(
            "generator=" in self._source.line(line.path, line.line + more)
            for more in range(_STATEMENT)
            if line.line
        )


def _finding(line: CodeLine, obstacle: Obstacle, places: list[Place | None]) -> Finding:
    count, inside = len(places), inside_libraries(places)
    return line.finding(
        RULE.code,
        f"in the way of a CUDA graph: {obstacle.what}, {times(count)} a step{inside}",
        obstacle.advice,
        count_per_step=count,
        source="modelled",
    )


def verdict(profile: Profile, findings: int) -> str:
    """Say in a sentence whether the step can be captured."""
    if all(storage.device.startswith("cpu") for storage in profile.storages):
        return "capturable: unknown, the step does not run on a device; --device a100 emulates one"
    if not findings:
        return (
            "capturable: yes, nothing in the recorded step prevents a CUDA graph; shapes and "
            "Python numbers stay as captured"
        )
    lines = "1 line is" if findings == 1 else f"{findings} lines are"
    return f"capturable: no, {lines} in the way (TT402)"


RULE = Rule(code="TT402", name="blocks-capture", check=check, on_request=True)
