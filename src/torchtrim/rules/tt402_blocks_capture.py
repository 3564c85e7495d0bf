"""A line keeps the step from being captured in a CUDA graph.

## What it does

Finds what a CUDA graph cannot hold, or would replay wrongly: host-device syncs, copies from host
memory, host numbers that would keep their captured values, random generators unknown to the graph,
optimizers that count their steps on the host, collectives, and operators whose source was not read.
It runs only on request: `torchtrim diagnose --capture`. It does not need a GPU.

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
from torchtrim.analysis.user_source import SourceLine, SourceLines, line_of
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Place, Profile
from torchtrim.rules.base import Rule
from torchtrim.syncs.explicit import is_unknown
from torchtrim.syncs.lookup import row

_COPIES = frozenset(("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_", "aten::copy"))
_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::")
_STATEMENT = 4  # Arbitrary; lines of a call over which `generator=` may stand.


class Obstacle(NamedTuple):
    """A reason why the step cannot be captured, and what to do about it."""

    kind: str
    what: str
    advice: str


_UPLOAD = Obstacle(
    "host memory",
    "copies from the host's memory, and a replay copies what is at the same address then",
    "copy into a tensor of the device that stays, before the replay",
)
_NUMBER = Obstacle(
    "host number",
    "computes with a tensor of the host, whose number stays what it was at the capture",
    "keep the number in a tensor on the device, and write to it before the replay",
)
_STEPS = Obstacle(
    "optimizer",
    "the optimizer counts its steps on the host, which a replay does not",
    "make it with capturable=True",
)
_GENERATOR = Obstacle(
    "generator",
    "draws from a generator of its own, which the graph does not know",
    "register it: graph.register_generator_state(generator), or draw from the device's own generator",
)
_COLLECTIVE = Obstacle(
    "collective",
    "a collective: NCCL's can be captured after warm-up, those of other backends cannot",
    "run 11 steps before the capture, and capture with NCCL 2.9.6 or newer on all ranks alike",
)


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each line and kind of obstacle."""
    found: dict[tuple[SourceLine, Obstacle], list[Place | None]] = defaultdict(list)
    waiting = set()
    for sync in profile.syncs:
        if code_of(sync.row) in CODES:
            waiting.add(sync.operator)
            known = row(sync.row)
            what = f"waits for the device ({known.what})"
            obstacle = Obstacle("sync", what, known.advice)
            found[line_of_sync(profile, sync), obstacle].append(library_place(profile, sync))
    obstacles = _Obstacles(profile)
    for number, op in enumerate(profile.operators):
        of_it = obstacles.of(number, op) if number not in waiting else None
        if of_it is not None:
            found[line_of(profile, number), of_it].append(library_place_of(profile, number))
    for (line, obstacle), places in found.items():
        yield _finding(line, obstacle, places)


class _Obstacles:
    """Finds for each operator what a graph cannot hold."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._source = SourceLines(profile.project)
        self._there = [not storage.device.startswith("cpu") for storage in profile.storages]
        self._trained = any(self._there)

    def of(self, number: int, op: Operator) -> Obstacle | None:
        """Return the obstacle, or None for an operator that can be captured."""
        if op.name.startswith(_COLLECTIVES):
            return _COLLECTIVE
        sides = {self._there[use.storage] for use in (*op.inputs, *op.outputs)}
        if sides == {False}:
            return _STEPS if op.phase == "optimizer" and self._counts(op) else None
        if sides == {True}:
            return self._on_device(number, op)
        if sides == {False, True} and any(not self._there[use.storage] for use in op.inputs):
            return self._mixed(op)
        return None

    def _counts(self, op: Operator) -> bool:
        storages = self._profile.storages
        written = {*op.mutates, *(use.storage for use in op.outputs)}
        return self._trained and any(storages[one].kind == "optimizer_state" for one in written)

    def _on_device(self, number: int, op: Operator) -> Obstacle | None:
        if is_unknown(op.name):
            name = base_name(op.name)
            what = f"`{name}`, whose source was not read, so whether it can be captured is unknown"
            return Obstacle("unknown", what, "capture it alone on a GPU to see")
        return _GENERATOR if op.random and self._has_generator(number) else None

    def _mixed(self, op: Operator) -> Obstacle | None:
        """Check an operator on the device that reads host memory."""
        if base_name(op.name) in _COPIES:
            writes = {*op.mutates, *(use.storage for use in op.outputs)}
            return _UPLOAD if any(self._there[one] for one in writes) else None
        return _NUMBER

    def _has_generator(self, number: int) -> bool:
        line = line_of(self._profile, number)
        return any(
            "generator=" in self._source.line(line.path, line.line + more)
            for more in range(_STATEMENT)
            if line.line
        )


def _finding(line: SourceLine, obstacle: Obstacle, places: list[Place | None]) -> Finding:
    count, inside = len(places), inside_libraries(places)
    return Finding(
        code=RULE.code,
        path=line.path,
        line=line.line,
        end_line=line.line,
        message=f"in the way of a CUDA graph: {obstacle.what}, {times(count)} a step{inside}",
        count_per_step=count,
        source="modelled",
        fix=Suggestion(kind="advice", reason=obstacle.advice),
    )


def verdict(profile: Profile, findings: int) -> str:
    """Say in a sentence if the step can be captured."""
    if all(storage.device.startswith("cpu") for storage in profile.storages):
        return "capturable: unknown, the step does not run on a device; --device a100 emulates one"
    if not findings:
        return (
            "capturable: yes, nothing in the recorded step prevents a CUDA graph; shapes and "
            "Python's numbers stay what they were at the capture"
        )
    lines = "1 line is" if findings == 1 else f"{findings} lines are"
    return f"capturable: no, {lines} in the way (TT402)"


RULE = Rule(code="TT402", name="blocks-capture", check=check, on_request=True)
