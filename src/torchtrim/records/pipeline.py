"""A pipeline: the stages a model is cut into, and the order of each rank's work."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_args

from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Positive = Annotated[int, Meta(ge=1, le=4096)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0)]
Schedule = Literal[
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
SPLITS_BACKWARD: frozenset[Schedule] = frozenset(
    ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
)


class Action(NamedTuple):
    """An action of a rank: `F` forward, `B` full backward, `I` backward to the inputs, `W` to the weights."""

    kind: Literal["F", "B", "I", "W"]
    stage: int
    batch: int


class Order(NamedTuple):
    """The actions of each rank in order, and the rank of each stage."""

    ranks: tuple[tuple[Action, ...], ...]
    homes: tuple[int, ...]

    def backwards(self) -> tuple[int, ...]:
        """Return the order of the micro-batches in gradient accumulation.

        Raises `AssertionError` if the order differs between stages; no schedule of torch does that.
        """
        found: dict[int, list[int]] = {stage: [] for stage in range(len(self.homes))}
        for actions in self.ranks:
            for kind, stage, batch in actions:
                if kind in "BW":
                    found[stage].append(batch)
        assert len({tuple(one) for one in found.values()}) == 1
        return tuple(found[0])


class StageSeconds(Struct, frozen=True, kw_only=True):
    """Measured seconds of a stage's actions on one micro-batch.

    `backward` is the full backward; `inputs` and `weights` are its two halves, 0 if not measured.
    """

    forward: Seconds
    backward: Seconds
    inputs: Seconds = 0.0
    weights: Seconds = 0.0


class Stage(Struct, frozen=True, kw_only=True):
    """One stage, with its predicted cost per micro-batch.

    `first` is the module it starts with, `rank` the rank that runs it. `held_bytes`: activations of a
    micro-batch in flight; `state_bytes`: the stage's parameters, gradients, optimizer state and buffers.
    `recompute`: backward reruns its forward.
    """

    first: Text
    rank: Count
    forward_seconds: Seconds
    backward_seconds: Seconds
    held_bytes: Bytes
    state_bytes: Bytes
    recompute: bool = False


class Pipeline(Struct, frozen=True, kw_only=True):
    """A model in stages.

    `root` is the model's name. A new stage begins before each module in `cuts`, a path below the root.
    `seconds` is the predicted time of a step, `bubble` the share that ranks are idle, `peaks` the
    predicted peak of each rank. `replicas`: the number of such pipelines that share the batch.
    """

    root: Text
    cuts: tuple[Text, ...]
    schedule: Schedule
    ranks: Positive
    microbatches: Positive
    replicas: Positive = 1
    seconds: Seconds = 0.0
    bubble: Annotated[float, Meta(ge=0, le=1)] = 0.0
    peaks: tuple[Bytes, ...] = ()
    stages: tuple[Stage, ...] = ()

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.ranks * self.replicas


class ScheduleFigures(Struct, frozen=True, kw_only=True):
    """The fastest predicted step of one of torch's schedules within the budget."""

    schedule: Schedule
    microbatches: Positive
    seconds: Seconds
    bubble: Annotated[float, Meta(ge=0, le=1)]
    peak_bytes: Bytes


class Bar(Struct, frozen=True, kw_only=True):
    """An action of a rank from `start` to `end`, in seconds; `kind` as in `Action`."""

    rank: Count
    stage: Count
    kind: Literal["F", "B", "I", "W"]
    batch: Count
    start: Seconds
    end: Seconds


class PipelineReport(Struct, frozen=True, kw_only=True):
    """A pipeline, and the schedules it was chosen from.

    `in_flight`: the most micro-batches each stage holds at once. `schedules`: fastest first. `bars`: one
    simulated step; empty if there are too many to draw.
    """

    pipeline: Pipeline
    in_flight: tuple[Count, ...] = ()
    schedules: tuple[ScheduleFigures, ...] = ()
    bars: tuple[Bar, ...] = ()
