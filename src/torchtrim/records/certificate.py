"""A certificate: measured evidence that the planned workload equals the original, and its file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from torchtrim.records.figures import Figures
from torchtrim.records.files import decode, read_bounded, write_atomically
from torchtrim.records.plan import Plan, PlanProof, digest_of_techniques

Verdict = Literal["BITWISE", "ROUNDING", "AS ASKED", "NOT EQUAL", "UNDECIDED"]


class Difference(Struct, frozen=True, kw_only=True):
    """The first quantity that differs; `op` names its kind, such as `gradient` or `output`.

    `operator` is the first operator of that step with a different result, `path` and `line` its call site
    and `inside` the module that ran it; `other_operator`, `other_path` and `other_line` are the other run's.
    All are empty if no operator differs, for example if the step changes a Python list.
    """

    module: str
    op: str
    path: str = ""
    line: int = 0
    operator: str = ""
    inside: str = ""
    other_operator: str = ""
    other_path: str = ""
    other_line: int = 0


class Coverage(Struct, frozen=True, kw_only=True):
    """The conditions a verdict was shown for, taken from the original run; nothing else is claimed.

    `inputs`: inputs of calls from user code, such as `"Net: float32[8, 3, 32, 32]"`. `batch_sizes`: first
    dimensions of each call's first input. `modes`: modes of the root modules. `dimensions`: numbers of
    dimensions of the inputs. `processes`: ranks of a distributed job. `complete`: `inputs` has all of them.
    """

    inputs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()
    modes: tuple[Literal["training", "evaluation"], ...] = ()
    steps: int = 0
    device: str = ""
    processes: tuple[int, ...] = (0,)
    complete: bool = True


class SemanticChange(Struct, frozen=True, kw_only=True):
    """The SEMANTIC techniques of a plan, and their effect on the loss.

    `others`: equivalence of everything else to the original with the same replacement made by hand.
    `losses` and `original_losses`: one per compared step, None if not finite. `largest_difference`: of the
    losses, relative to the original's largest; None without losses.
    """

    techniques: tuple[str, ...]
    others: Literal["BITWISE", "ROUNDING"]
    losses: tuple[float | None, ...]
    original_losses: tuple[float | None, ...]
    largest_difference: float | None


class Certificate(Struct, frozen=True, kw_only=True):
    """A verdict with its figures.

    `compared` counts the compared quantities, such as `"24 gradients x 3 steps"`. `largest_difference` is
    relative to the largest magnitude of the quantity that differs most; None if not measured, 0 if all bits
    agree. `noise` is the same figure for the original against itself. `seeds` names who seeded the random
    numbers. `reason` explains the verdict in a sentence. `coverage`: shapes, types, modes and steps the
    verdict was shown for; None in certificates older than the field. `assumes`: what the plan relies on in
    later steps and no check sees. `asked`: the replacement, for the
    verdict AS ASKED; the figures then compare with the original with the replacement made by hand. `sees`: by
    kind of quantity, such as `"loss"`, the smallest relative change before the first update that would
    have been seen; empty if no rounding was to be told from a fault. `otherwise`: how the other program is
    built, if it is not built as the original, and what is not compared for that.
    """

    verdict: Verdict
    compared: tuple[str, ...]
    largest_difference: float | None
    first_difference: Difference | None
    noise: float | None
    seeds: Literal["script", "torchtrim"]
    steps: int
    reason: str = ""
    coverage: Coverage | None = None
    assumes: tuple[str, ...] = ()
    asked: SemanticChange | None = None
    sees: dict[str, float] = {}
    otherwise: str = ""


def with_proof(plan: Plan, certificate: Certificate, args: tuple[str, ...] | None = None) -> Plan:
    """Return the plan with the verdict on it, unless it was not equal or is unknown.

    `args`: the arguments of the script.
    """
    covered = certificate.coverage
    if covered is None or certificate.verdict in ("NOT EQUAL", "UNDECIDED"):
        return plan
    proof = PlanProof(
        verdict=certificate.verdict,
        techniques=digest_of_techniques(plan.techniques, plan.compiled),
        steps=certificate.steps,
        inputs=covered.inputs,
        complete=covered.complete,
        device=covered.device,
        args=args,
    )
    return msgspec.structs.replace(plan, certified=proof)


_MOST_BYTES = 2**24  # Arbitrary; bounds what a hostile file makes us read.


class Program(Struct, frozen=True, kw_only=True):
    """A script or module with its arguments.

    `sha256` is the hash of a script's text, empty for a module; `processes` is the number of ranks it ran on.
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    sha256: str = ""
    processes: int = 1


class KeptCertificate(Struct, frozen=True, kw_only=True):
    """A certificate with everything needed to repeat it.

    The second run was of the program `other`, or of the first program under `plan`. `results` is a digest of
    everything the original computed, prefixed with the version of the digest. `machine` names the system,
    the cores and torch's threads, `made` the day.
    """

    schema_version: Literal[1] = 1
    certificate: Certificate
    original: Program
    other: Program | None = None
    plan: Plan | None = None
    steps: int = 3
    warmup: int = 1
    device: str | None = None
    torchtrim: str = ""
    torch: str = ""
    python: str = ""
    machine: str = ""
    made: str = ""
    results: str = ""
    before: Figures | None = None
    after: Figures | None = None


def load_certificate(path: Path) -> KeptCertificate:
    """Load a certificate. Raises `UnreadableInput`, naming the field, if the file is not one."""
    return decode(read_bounded(path, _MOST_BYTES), KeptCertificate, str(path), name="certificate")


def save_certificate(kept: KeptCertificate, path: Path) -> None:
    """Write the certificate with a line per field, atomically."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
