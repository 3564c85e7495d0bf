"""A trial: one run of a workload, original or planned, and what it left as evidence."""

from __future__ import annotations

import statistics
from typing import Literal

from msgspec import Struct

from torchtrim.records.loader import LoaderCost, Tuning
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile
from torchtrim.records.seen import Observed, Probe
from torchtrim.records.sharding import Sharding


class Tunes(Struct, frozen=True, kw_only=True):
    """How a script's loader is to be tuned: within these seconds, bytes of batches ahead and cores."""

    seconds: float = 60.0
    memory: int | None = None
    cores: int | None = None


class Request(Struct, frozen=True, kw_only=True):
    """What to run: `warmup` steps, one that is recorded, and `steps` that are timed and compared.

    `times`: of how many more the times of operators are recorded, if the workload goes on by itself.
    `keep`: evidence whose values are wanted, as `"step/quantity:name"`, saved in a folder.
    `double`: run in float64. `nudged`: parameters begin one rounding away from what they are.
    `dry`: nothing is computed, and what it would need is modelled.
    `batch_size`: what a script's loaders are to give, if not what they would.
    `infers`: the script only runs its models; a step is a call of the first of them.
    `texts`: what files, by absolute path, are run as instead. `probes`: expressions to look at.
    `measured`: figures are wanted, not only evidence. `exported`: the file of a module whose `apply`
    replaces the plan's. `traced`: the number of a step of which every operator is recorded with a digest of
    what it gave, -1 for none. `streams`: the order of an emulated device's streams; at once where it is
    empty. `host_memory`: bytes that a plan may take of the host's, None for no limit. `tunes`: the loader is
    to be tuned after the compared steps. `by_hand`: the plan's SEMANTIC techniques are applied as a person
    would write them. `grows`: what grows from step to step is looked for. `round_trip`: before the last step
    models and optimizers load what they would save. `ranks`: of how many this is to seem the first, in a dry
    run; 0 for none. `sharding`: shard its models over them.
    """

    plan: Plan | None = None
    steps: int = 3
    warmup: int = 1
    keep: tuple[str, ...] = ()
    double: bool = False
    nudged: bool = False
    dry: bool = False
    infers: bool = False
    batch_size: int | None = None
    device: str | None = None
    texts: dict[str, str] = {}
    probes: tuple[Probe, ...] = ()
    times: int = 0
    measured: bool = True
    exported: str = ""
    traced: int = -1
    streams: str = ""
    host_memory: int | None = None
    tunes: Tunes | None = None
    by_hand: bool = False
    grows: bool = False
    round_trip: bool = False
    ranks: int = 0
    sharding: Sharding | None = None

    @property
    def total(self) -> int:
        """All steps."""
        return self.warmup + 1 + self.steps


class Call(Struct, frozen=True, kw_only=True):
    """A call of a root from outside: its mode, and its inputs, such as `"float32[8, 3]"`."""

    root: str
    training: bool
    inputs: tuple[str, ...]


class Step(Struct, kw_only=True):
    """One step: digests by `(quantity, name)` joined with a colon, in the order they were seen.

    `calls`: each kind of call of a root once. `inputs`: digests of what roots were called with. A loss that
    is not finite, which JSON cannot say, is None. `left_bytes`: by how much more is alive after the step than
    before it.
    """

    digests: dict[str, str] = {}
    calls: list[Call] = []
    inputs: dict[str, str] = {}
    losses: list[float | None] = []
    seconds: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int | None = None
    left_bytes: int = 0


class Crash(Struct, frozen=True, kw_only=True):
    """How the workload failed: `kind`, the error, and what was seen until then.

    `place`: where a plan had changed what failed, empty where that is not known.
    """

    kind: Literal["crashed", "exited", "out of memory", "no step", "refused"]
    message: str
    traceback: str = ""
    operator: str = ""
    shapes: str = ""
    phase: str = ""
    path: str = ""
    line: int = 0
    place: str = ""


class Trial(Struct, kw_only=True):
    """What one run left. `profile` is of the recorded step, or of the one that failed.

    `notes` say what an emulated device did not do as a real one would, and what a dry run assumed.
    `elsewhere`: calls of modules in threads that are not watched.
    `batch_size` is what a script's loaders gave in a dry run, None where none was seen. `call_bytes`: what
    the plans of the models' calls say that a call needs, None where a part has none. `processes`: how many
    the script started by itself, loaders' workers not counted. `digests`: of what each operator of the
    profile gave, in a step that was traced; `lines`: the user's own that led to each, and whether it asked
    itself, not through `backward`. `ranks`: the trial of each rank, where several ran; this one then is of
    the rank with the highest peak. `loader`: what it costs; `tuning`: what was found for it. `sharded`: the
    modules that were sharded one by one.
    """

    request: Request
    device: str = "cpu"
    profile: Profile | None = None
    recorded: int = -1
    steps: list[Step] = []
    forwards: int = 0
    elsewhere: int = 0
    backwards: int = 0
    optimizer_steps: int = 0
    processes: int = 0
    fingerprint: dict[str, str] = {}
    seeds: Literal["script", "torchtrim"] = "torchtrim"
    rss_bytes: int | None = None
    notes: tuple[str, ...] = ()
    batch_size: int | None = None
    call_bytes: int | None = None
    observed: tuple[Observed, ...] = ()
    digests: tuple[str, ...] = ()
    lines: tuple[tuple[str, int, bool], ...] = ()
    crash: Crash | None = None
    ranks: tuple[Trial, ...] = ()
    loader: LoaderCost | None = None
    tuning: Tuning | None = None
    sharded: tuple[str, ...] = ()

    @property
    def timed(self) -> list[Step]:
        """The steps that were timed; the recorded one if there are no others."""
        timed = self.steps[self.request.warmup + 1 :]
        return timed or self.steps[-1:]

    @property
    def seconds(self) -> float:
        """Median time of the timed steps."""
        return statistics.median(step.seconds for step in self.timed) if self.steps else 0.0

    @property
    def peak_bytes(self) -> int:
        """Highest peak of all measured steps."""
        peaks = [step.peak_bytes for step in self.steps[self.request.warmup :]]
        recorded = self.profile.peak_bytes if self.profile else 0
        return max((*peaks, recorded))
