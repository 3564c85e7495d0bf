"""Reports and profiles that no program made: one of each sort that the renderers must know."""

from __future__ import annotations

import msgspec

from report.missed import COVERAGE, POINTS, lever, missed
from torchtrim.records import Certificate, Difference, Figures, Finding, Profile, Report, Suggestion
from torchtrim.records.estimate import EstimateReport, GrowthLimit, ModuleBytes
from torchtrim.records.figures import PeakPart
from torchtrim.records.fix import Fixes, FixRecord
from torchtrim.records.plan import Prediction, Technique
from torchtrim.records.profile import Module, Operator, Place, Storage, TensorUse
from torchtrim.records.report import Holder, PlanSummary, StreamReport, WaitCost, WaitSet

MIB = 2**20
SCRIPT = "/home/ana/segmenter/train.py"
MODEL = "/home/ana/segmenter/models/encoder.py"
HOSTILE = "[red]\x1b[31mev\u202eil\u200f\r\n</script><script>alert(1)</script>"

DIFF = """--- models/encoder.py
+++ models/encoder.py
@@ -41,3 +41,3 @@
     def forward(self, x):
-        return F.relu(self.norm(x))
+        return F.relu(self.norm(x), inplace=True)
"""


def figures(peak: int, seconds: float, spread: float, **kinds: int) -> Figures:
    by_kind = {kind: mib * MIB for kind, mib in kinds.items()}
    return Figures(
        peak_bytes=peak * MIB,
        tracked_peak_bytes=(peak - 9) * MIB,
        reserved_bytes=None,
        rss_bytes=(peak + 600) * MIB,
        step_seconds=seconds,
        spread_seconds=spread,
        by_kind=by_kind,
    )


def finding(code: str, line: int, message: str, **more: object) -> Finding:
    path = str(more.pop("path", MODEL))
    base = Finding(
        code=code, path=path, line=line, end_line=line, message=message, count_per_step=1
    )
    return msgspec.structs.replace(base, **more)


FINDINGS = (
    finding(
        "TT201",
        43,
        "the input of relu is kept although its output is enough for the backward pass",
        price_bytes=74 * MIB,
        count_per_step=12,
        fix=Suggestion(
            kind="code", equivalence="BITWISE", diff=DIFF, reason="relu can work in place"
        ),
    ),
    finding(
        "TT202",
        88,
        "logits of the whole batch are alive twice in the loss",
        path=SCRIPT,
        price_bytes=51 * MIB,
        fix=Suggestion(kind="config", equivalence="ROUNDING", reason="chunked_loss"),
    ),
    finding("TT299", 90, "loss history keeps every graph", path=SCRIPT, price_bytes=12 * MIB),
    finding(
        "TT101",
        97,
        "`.item()` in the loop waits for the device",
        path=SCRIPT,
        price_ms=3.2,
        source="modelled",
        count_per_step=4,
    ),
    finding(
        "TT301",
        60,
        "the step waits for its loader, which has no workers",
        path=SCRIPT,
        price_ms=41.0,
        fix=Suggestion(kind="refused", reason="the dataset is not safe to fork"),
    ),
)


def holder(mib: int, count: int, module: str, path: str, line: int, why: str) -> Holder:
    return Holder(
        bytes=mib * MIB,
        count=count,
        kind="activation",
        module=module,
        path=path,
        line=line,
        why=why,
    )


HOLDERS = (
    holder(120, 24, "model.encoder.layers.3.attention", MODEL, 42, "saved for backward by softmax"),
    holder(74, 12, "model.encoder.layers.3.relu", MODEL, 43, "saved for backward by relu"),
    holder(51, 2, "model.head", SCRIPT, 88, "named `logits` in the script"),
    holder(20, 1, "", SCRIPT, 71, "the batch"),
)

ORIGINAL = figures(
    412,
    0.612,
    0.02,
    activation=260,
    gradient=55,
    optimizer_state=44,
    parameter=22,
    input=20,
    temporary=11,
)
PLANNED = figures(
    236,
    0.679,
    0.02,
    activation=90,
    gradient=55,
    optimizer_state=44,
    parameter=22,
    input=20,
    temporary=5,
)

PLAN = PlanSummary(
    techniques=(
        Technique(
            name="recompute", where=tuple(f"model.encoder.layers.{i}" for i in (0, 1, 2, 3, 7))
        ),
        Technique(
            name="offload_activations",
            where=("model.head",),
            options={"pinned": True},
        ),
    ),
    predicted=Prediction(peak_bytes=240 * MIB, step_seconds=0.66),
)

BITWISE = Certificate(
    verdict="BITWISE",
    compared=("3 losses", "24 gradients x 3 steps", "24 parameters", "8 buffers", "RNG state"),
    largest_difference=0.0,
    first_difference=None,
    noise=0.0,
    seeds="torchtrim",
    steps=3,
    reason="every compared bit is equal",
    coverage=COVERAGE,
)

OPTIMIZE = Report(
    torchtrim="0.1.0",
    torch="2.13.0",
    verb="optimize",
    device="cpu",
    script=SCRIPT,
    steps=5,
    original=ORIGINAL,
    planned=PLANNED,
    budget_bytes=247 * MIB,
    findings=FINDINGS,
    holders=HOLDERS,
    plan=PLAN,
    certificate=BITWISE,
    notes=("the script sets no seed; torchtrim seeded it with 0",),
)

DIAGNOSE = msgspec.structs.replace(
    OPTIMIZE, verb="diagnose", planned=None, budget_bytes=None, plan=None, certificate=None
)

PLANNING = msgspec.structs.replace(
    OPTIMIZE,
    verb="plan",
    planned=None,
    certificate=None,
    findings=(),
    frontier=POINTS,
)

VERIFY = Report(
    torchtrim="0.1.0",
    torch="2.13.0",
    verb="verify",
    device="cpu",
    script=SCRIPT,
    steps=3,
    certificate=BITWISE,
)

NOT_EQUAL = msgspec.structs.replace(
    OPTIMIZE,
    certificate=Certificate(
        verdict="NOT EQUAL",
        compared=("3 losses", "24 gradients x 3 steps"),
        largest_difference=0.031,
        first_difference=Difference(
            module="model.encoder.layers.3", op="gradient", path=MODEL, line=43
        ),
        noise=0.0,
        seeds="script",
        steps=3,
        reason="the difference does not shrink in double precision",
    ),
)

UNDECIDED = msgspec.structs.replace(
    OPTIMIZE,
    planned=figures(251, 0.62, 0.05, activation=105, gradient=55, optimizer_state=44, parameter=22),
    certificate=Certificate(
        verdict="UNDECIDED",
        compared=("3 losses",),
        largest_difference=2.1e-6,
        first_difference=None,
        noise=3.4e-6,
        seeds="script",
        steps=3,
        reason="the original does not equal itself: index_add on several threads",
    ),
)

STREAM = Report(
    torchtrim="0.1.0",
    torch="2.13.0",
    verb="stream-check",
    device="cpu",
    script="/home/ana/segmenter/video.py",
    steps=60,
    findings=(
        finding(
            "TT501",
            31,
            "Records `session.frames` grows by 1 entries and 2.09 KiB a frame",
            price_bytes=2138,
            fix=Suggestion(kind="advice", reason='`bound_caches(model, {"frames": window(n)})`'),
        ),
    ),
    notes=("a frame is a call of Tracker; 60 frames",),
    stream=StreamReport(
        frame="a call of Tracker",
        frames=60,
        first=24,
        growth_bytes=3193,
        process_growth_bytes=-4096,
        frame_seconds=0.047,
        max_growth_bytes=1024,
    ),
)

BOUNDED = msgspec.structs.replace(
    STREAM,
    verb="verify",
    findings=(),
    certificate=BITWISE,
    stream=msgspec.structs.replace(
        STREAM.stream,
        growth_bytes=0,
        max_growth_bytes=None,
        bounded=("tracker.memory",),
        unbounded_growth_bytes=3193,
        unbounded_frame_seconds=0.061,
    ),
)

FIXED = msgspec.structs.replace(
    DIAGNOSE,
    verb="optimize",
    certificate=BITWISE,
    fixes=Fixes(
        places=(
            FixRecord(
                name="masked_fill",
                path=MODEL,
                line=43,
                state="applied",
                equivalence="BITWISE",
                syncs_before=3,
                syncs_after=0,
                diff=DIFF,
            ),
            FixRecord(
                name="distinct_count",
                path=SCRIPT,
                line=97,
                state="refused",
                equivalence="ROUNDING",
                syncs_before=1,
                reason="no run has shown that `labels` is a tensor of integers",
            ),
            FixRecord(
                name="masked_sum",
                path=SCRIPT,
                line=99,
                state="reverted",
                equivalence="ROUNDING",
                syncs_before=1,
                syncs_after=0,
                reason="the device alone is busy for 12.4 ms with the fixes, and the step took 11.9 ms",
            ),
        ),
        syncs_before=4,
        syncs_after=1,
        diff=DIFF,
        certificate=BITWISE,
    ),
    waiting=WaitCost(
        device="a10g",
        source="modelled",
        step_ms=11.9,
        device_busy_ms=6.5,
        bound="waits",
        all_saves_ms=1.52,
        sets=(WaitSet(findings=(3,), saves_ms=1.5),),
    ),
)

ESTIMATE = msgspec.structs.replace(
    DIAGNOSE,
    verb="estimate",
    findings=(),
    budget_bytes=1024 * MIB,
    estimated=EstimateReport(
        parameter_bytes=22 * MIB,
        gradient_bytes=23 * MIB,
        optimizer_bytes=44 * MIB,
        modules=(
            ModuleBytes(path="model.encoder", bytes=301 * MIB),
            ModuleBytes(path="", bytes=20 * MIB),
        ),
        recomputed_bytes=199 * MIB,
        recomputed=("model.encoder.layers.0", "model.encoder.layers.1"),
        growth=(
            GrowthLimit(
                what="batch",
                budget_bytes=1024 * MIB,
                now=8,
                largest=21,
                peak_bytes=1011 * MIB,
                next_bytes=1061 * MIB,
            ),
        ),
    ),
)

MISSED = missed(OPTIMIZE)

HOSTILE_REPORT = msgspec.structs.replace(
    OPTIMIZE,
    stream=StreamReport(
        frame=HOSTILE,
        frames=9,
        first=3,
        growth_bytes=1,
        process_growth_bytes=1,
        frame_seconds=0.1,
        bounded=(HOSTILE, HOSTILE),
    ),
    fixes=Fixes(
        places=(
            FixRecord(
                name=HOSTILE,
                path=HOSTILE,
                line=1,
                state="refused",
                equivalence="BITWISE",
                diff=HOSTILE * 9,
                reason=f"`{HOSTILE}`",
            ),
        ),
        syncs_before=1,
        syncs_after=1,
        diff=HOSTILE * 9,
    ),
    estimated=EstimateReport(
        parameter_bytes=1,
        gradient_bytes=1,
        optimizer_bytes=1,
        modules=(ModuleBytes(path=HOSTILE, bytes=1),),
        recomputed_bytes=1,
        recomputed=(HOSTILE,),
        growth=(
            GrowthLimit(
                what="batch",
                budget_bytes=1,
                now=1,
                largest=1,
                peak_bytes=1,
                next_bytes=None,
                limited_by=HOSTILE,
            ),
        ),
    ),
    waiting=msgspec.structs.replace(FIXED.waiting, device=HOSTILE, bound=HOSTILE),
    script=HOSTILE + "/train.py",
    device=HOSTILE,
    findings=tuple(
        msgspec.structs.replace(
            f,
            path="/" + "long/" * 60 + HOSTILE,
            message=HOSTILE * 20,
            fix=Suggestion(kind="code", diff=HOSTILE * 200, reason=HOSTILE),
        )
        for f in FINDINGS
    ),
    holders=tuple(
        msgspec.structs.replace(
            h,
            **dict.fromkeys(("path", "why", "type", "made_path", "what"), HOSTILE),
            module=HOSTILE * 9,
            made_line=1,
        )
        for h in HOLDERS
    ),
    plan=msgspec.structs.replace(
        PLAN,
        techniques=(Technique(name=HOSTILE, where=(HOSTILE, "x.9", "x.10"), options={HOSTILE: 1}),),
    ),
    certificate=msgspec.structs.replace(
        NOT_EQUAL.certificate,
        compared=(HOSTILE,),
        reason=HOSTILE,
        first_difference=Difference(module=HOSTILE, op=HOSTILE, path=HOSTILE, line=1),
    ),
    notes=(HOSTILE,) * 3,
    floor_bytes=1,
    peak_parts=(PeakPart(what=HOSTILE, bytes=1),),
    levers=(lever(HOSTILE, 1, 1.0, needs=HOSTILE),),
)

ALL = {
    "optimize": OPTIMIZE,
    "missed": MISSED,
    "diagnose": DIAGNOSE,
    "plan": PLANNING,
    "verify": VERIFY,
    "not equal": NOT_EQUAL,
    "undecided": UNDECIDED,
    "stream": STREAM,
    "bounded stream": BOUNDED,
    "fixed": FIXED,
    "estimate": ESTIMATE,
    "hostile": HOSTILE_REPORT,
}


def profile(peak_mib: int, layers: int = 24, name: str = "model") -> Profile:
    """A step of a chain of layers, each of which keeps its output until its backward."""
    kept = (peak_mib * MIB - 9 * MIB - 86 * MIB - 2 * MIB) // layers
    operators = [_operator("aten::relu.default", "forward", i) for i in range(layers)]
    operators += [
        _operator("aten::relu_backward.default", "backward", layers + i) for i in range(layers)
    ]
    operators += [_operator("aten::adam_.default", "optimizer", 2 * layers)]
    end = len(operators)
    storages = [
        Storage(22 * MIB, "parameter", -1, end, "cpu", "weight"),
        Storage(44 * MIB, "optimizer_state", -1, end, "cpu", "exp_avg"),
        Storage(20 * MIB, "input", -1, end, "cpu", ""),
    ]
    storages += [Storage(kept, "activation", i, 2 * layers - i, "cpu", "") for i in range(layers)]
    storages += [
        Storage(2 * MIB, "gradient", layers + i, end, "cpu", f"{name}.{i}") for i in range(layers)
    ]
    peak = 86 * MIB + layers * kept + 2 * MIB
    return Profile(
        torchtrim="0.1.0",
        torch="2.13.0",
        device="cpu",
        script=SCRIPT,
        project="/home/ana/segmenter",
        step_seconds=0.6,
        peak_bytes=peak + 9 * MIB,
        tracked_peak_bytes=peak,
        reserved_bytes=None,
        rss_bytes=None,
        operators=operators,
        storages=storages,
        modules=[Module(name, "Encoder", -1, True, False, 22 * MIB)],
        calls=[],
        places=[Place(MODEL, 43, "forward")],
        labels=[],
        waits=[],
    )


def _operator(name: str, phase: str, at: int) -> Operator:
    use = TensorUse(0, "float32", (4, 4), (4, 1))
    return msgspec.convert(
        [name, phase, 0, 0, 0, -1, -1, [use], [use], [], at * 0.03, 0.03, 0], Operator
    )
