"""A pipeline: how a model is cut into stages, and in which order its ranks work on them."""

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
    """What a rank does: `F` forward, `B` whole backward, `I` backward to the inputs, `W` to the weights."""

    kind: Literal["F", "B", "I", "W"]
    stage: int
    batch: int


class Order(NamedTuple):
    """What each rank does, in its order, and the rank of each stage."""

    ranks: tuple[tuple[Action, ...], ...]
    homes: tuple[int, ...]

    def backwards(self) -> tuple[int, ...]:
        """The micro-batches in the order in which their gradients are added up, the same for all stages.

        `AssertionError` for an order that differs between stages; torch has none.
        """
        found = {stage: [] for stage in range(len(self.homes))}  # type: dict[int, list[int]]
        for actions in self.ranks:
            for kind, stage, batch in actions:
                if kind in "BW":
                    found[stage].append(batch)
        assert len({tuple(one) for one in found.values()}) == 1
        return tuple(found[0])


class Clocked(Struct, frozen=True, kw_only=True):
    """Seconds that the actions of a stage were measured to take for a micro-batch.

    `backward` is whole; `inputs` and `weights` are its halves, 0 where they were not measured.
    """

    forward: Seconds
    backward: Seconds
    inputs: Seconds = 0.0
    weights: Seconds = 0.0


class Stage(Struct, frozen=True, kw_only=True):
    """One stage, and what it is predicted to need for a micro-batch.

    `first` is the module with which it begins, `rank` where it runs. `held_bytes`: activations of a
    micro-batch in flight; `state_bytes`: parameters, gradients, optimizer state and buffers of its own.
    `recompute`: its forward runs again in backward.
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

    `root` is the name of the model. `cuts` are the modules, paths below the root, before which a new
    stage begins. `seconds` is what the step is predicted to take, `bubble` the share of it in which ranks
    idle, `peaks` the predicted peak of each rank. `replicas`: how many such pipelines share the batch.
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
        """How many processes run it."""
        return self.ranks * self.replicas


class ScheduleFigures(Struct, frozen=True, kw_only=True):
    """The quickest that a schedule of torch is predicted to be within the budget."""

    schedule: Schedule
    microbatches: Positive
    seconds: Seconds
    bubble: Annotated[float, Meta(ge=0, le=1)]
    peak_bytes: Bytes


class Bar(Struct, frozen=True, kw_only=True):
    """What a rank does from `start` to `end`, in seconds; `kind` as in `Action`."""

    rank: Count
    stage: Count
    kind: Literal["F", "B", "I", "W"]
    batch: Count
    start: Seconds
    end: Seconds


class PipelineReport(Struct, frozen=True, kw_only=True):
    """A pipeline, and what it was chosen from.

    `in_flight`: the most micro-batches that each stage holds at once. `schedules`: the quickest first.
    `bars`: one step as simulated; empty where it has too many to draw.
    """

    pipeline: Pipeline
    in_flight: tuple[Count, ...] = ()
    schedules: tuple[ScheduleFigures, ...] = ()
    bars: tuple[Bar, ...] = ()
