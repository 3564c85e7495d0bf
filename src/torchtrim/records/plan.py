"""A plan: the techniques chosen for a budget. A file that a person reads, edits and commits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.budget import Budget, MemoryKind
from torchtrim.records.finding import Equivalence
from torchtrim.records.pipeline import Pipeline

Text = Annotated[str, Meta(max_length=4096)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
Status = Literal["optimal", "feasible"]


class Technique(Struct, frozen=True, kw_only=True):
    """One technique at some places.

    `where`: module paths, the root's name first, some with the role and ordinal of an operator in a call of
    the module. `assumes`: what has to hold in later steps, in words.
    """

    name: Text
    where: tuple[Text, ...]
    options: dict[Text, Text | int | float | bool] = {}
    equivalence: Equivalence = "BITWISE"
    assumes: tuple[Text, ...] = ()


class Sizes(Struct, frozen=True, kw_only=True):
    """Sizes of one dimension of a root's input: from `least` to `most`, both included."""

    input: Text
    dimension: Annotated[int, Meta(ge=0, le=64)]
    least: Bytes
    most: Bytes


class Prediction(Struct, frozen=True, kw_only=True):
    """What the planner expects of a planned step.

    `stall_seconds` of it are spent until copies from and to the host end, whose memory has `host_bytes`.
    """

    peak_bytes: Bytes
    step_seconds: Annotated[float, Meta(ge=0)]
    host_bytes: Bytes = 0
    stall_seconds: Annotated[float, Meta(ge=0)] = 0.0


class Plan(Struct, frozen=True, kw_only=True):
    """What to do to which model for which budget.

    `fingerprint` holds a hash of each root's paths, types and shapes; `script_sha256` is the
    script's. What is left out is not checked. `status`: whether no quicker choice of options fits, as far
    as the simulator knows; `bound_seconds`: what a step within the budget takes at least, None if unknown.
    `pins` are a person's: patterns of places by what holds there in every plan, `keep` for nothing at all,
    or the name of a technique. `pipeline`: the model in stages, in several processes; such a plan has no
    techniques. `sizes`: the inputs for which the plan holds, those of the recorded step where none is given.
    `graphs`: a digest of each compiled graph that places name.

    Schema 1 named kernels in its places where schema 2 names roles (`records.roles`); both are read.
    """

    schema_version: Literal[2] = 2
    torchtrim: Text
    script: Text
    script_sha256: Text = ""
    fingerprint: dict[Text, Text]
    budget_bytes: Bytes
    memory_kind: MemoryKind = "allocated"
    techniques: tuple[Technique, ...] = ()
    predicted: Prediction
    pins: dict[Text, tuple[Text, ...]] = {}
    status: Status = "feasible"
    bound_seconds: Annotated[float, Meta(ge=0)] | None = None
    pipeline: Pipeline | None = None
    sizes: tuple[Sizes, ...] = ()
    graphs: dict[Text, Text] = {}

    @property
    def budget(self) -> Budget:
        """The budget that it is for."""
        return Budget(self.budget_bytes, self.memory_kind)

    @property
    def gap(self) -> float | None:
        """By how much the predicted step may be slower than the quickest: a share of it, None if unknown."""
        if self.status == "optimal":
            return 0.0
        if self.bound_seconds is None or not self.predicted.step_seconds:
            return None
        return 1 - self.bound_seconds / self.predicted.step_seconds
