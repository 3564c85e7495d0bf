"""A plan: the techniques chosen for a budget. A file that people read, edit and commit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from torchtrim.records.budget import Budget, MemoryKind
from torchtrim.records.finding import Equivalence
from torchtrim.records.pipeline import Pipeline

Text = Annotated[str, Meta(max_length=4096)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
Status = Literal["optimal", "feasible"]


class Technique(Struct, frozen=True, kw_only=True):
    """One technique and the places it applies to.

    `where`: module paths starting with the root's name, some with the role and ordinal of an operator in a
    call of the module. `assumes`: conditions that later steps have to meet, in words.
    """

    name: Text
    where: tuple[Text, ...]
    options: dict[Text, Text | int | float | bool] = {}
    equivalence: Equivalence = "BITWISE"
    assumes: tuple[Text, ...] = ()


class Sizes(Struct, frozen=True, kw_only=True):
    """Sizes of one dimension of a root's input, from `least` to `most` inclusive."""

    input: Text
    dimension: Annotated[int, Meta(ge=0, le=64)]
    least: Bytes
    most: Bytes


class CompiledGraph(Struct, frozen=True, kw_only=True):
    """The tensors that a graph of `torch.compile` saves for backward.

    `graph`: a digest of its operators, shapes and edges. `saves`: digests of the saved tensors, each of the
    operators that it is computed from. `double`, `double_saves`: the same without precisions and casts, for
    the certificate's run in float64, where autocast casts nothing.
    """

    graph: Text
    saves: tuple[Text, ...]
    double: Text = ""
    double_saves: tuple[Text, ...] = ()


class PredictedEffect(Struct, frozen=True, kw_only=True):
    """The predicted effect of a technique, on top of those before it in the plan."""

    technique: Text
    saved_bytes: int
    added_seconds: float


class Prediction(Struct, frozen=True, kw_only=True):
    """Predicted figures of a planned step.

    `stall_seconds` is the time compute waits for copies to and from the host; `host_bytes` is the host memory
    that the copies use. `effects` are those of simulated techniques, in the plan's order. `device`: the
    device of the run that they are predicted from.
    """

    peak_bytes: Bytes
    step_seconds: Annotated[float, Meta(ge=0)]
    host_bytes: Bytes = 0
    stall_seconds: Annotated[float, Meta(ge=0)] = 0.0
    effects: tuple[PredictedEffect, ...] = ()
    device: Text = ""


class PlanProof(Struct, frozen=True, kw_only=True):
    """The verdict on a plan, and the conditions it was shown for.

    `techniques`: a digest of the plan's techniques; with other techniques the plan was edited since.
    `inputs`: inputs of calls from user code, such as `"Net: float32[8, 3, 32, 32]"`; all if `complete`.
    `args`: the script's arguments, null if unknown.
    """

    verdict: Text
    techniques: Text
    steps: Bytes
    inputs: tuple[Text, ...]
    complete: bool = True
    device: Text = ""
    args: tuple[Text, ...] | None = None


class Plan(Struct, frozen=True, kw_only=True):
    """The techniques chosen to fit a workload into a budget.

    `asked` is the budget as the user wrote it, empty if unknown.
    `fingerprint` has a hash of each root's paths, types and shapes; `script_sha256` has the hashes of the
    script's bytes and of its code without comments, joined by a dot. Entries that are missing are not
    checked. `status` is "optimal" if the simulator knows no faster choice that fits; `bound_seconds` is a
    lower bound of the step time within the budget, None if unknown. `pins` are written by the user:
    patterns of places that must not change, under `keep`, that must have a technique, under its name, or
    that must not have one, under `never`. `pipeline`: the model in stages, in several processes; such a
    plan has no techniques. `sizes`: the input sizes the plan is valid for; if empty, the recorded ones.
    `graphs`: a digest of each captured graph that a place refers to. `compiled`: the graphs that the script
    compiles by `torch.compile`, which then stays on. `certified`: the verdict on the plan, None for a plan
    that was not tried.

    Places of schema 1 name kernels, those of schema 2 roles (`records.operator_names`); both can be read.
    """

    schema_version: Literal[2] = 2
    torchtrim: Text
    script: Text
    script_sha256: Text = ""
    fingerprint: dict[Text, Text]
    budget_bytes: Bytes
    asked: Text = ""
    memory_kind: MemoryKind = "allocated"
    techniques: tuple[Technique, ...] = ()
    predicted: Prediction
    pins: dict[Text, tuple[Text, ...]] = {}
    status: Status = "feasible"
    bound_seconds: Annotated[float, Meta(ge=0)] | None = None
    pipeline: Pipeline | None = None
    sizes: tuple[Sizes, ...] = ()
    graphs: dict[Text, Text] = {}
    compiled: tuple[CompiledGraph, ...] = ()
    certified: PlanProof | None = None

    @property
    def is_of_calls(self) -> bool:
        """True if the plan is for calls without gradients, not for training."""
        return any(one.name == "release" for one in self.techniques)

    @property
    def budget(self) -> Budget:
        """The budget the plan was made for."""
        return Budget(self.budget_bytes, self.memory_kind, asked=self.asked)

    @property
    def gap(self) -> float | None:
        """Share of the predicted step that a faster plan could save at most, None if unknown."""
        if self.status == "optimal":
            return 0.0
        if self.bound_seconds is None or not self.predicted.step_seconds:
            return None
        return 1 - self.bound_seconds / self.predicted.step_seconds


def digest_of_techniques(
    techniques: Sequence[Technique], compiled: Sequence[CompiledGraph] = ()
) -> str:
    """Return a digest of techniques, their places and their options, and of compiled graphs."""
    text = msgspec.json.encode(techniques, order="sorted")
    text += msgspec.json.encode(compiled) if compiled else b""
    return hashlib.sha256(text).hexdigest()[:16]
