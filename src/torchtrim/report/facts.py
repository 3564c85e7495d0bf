"""The facts of a report in words. All renderers share them, so that every output says the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import PurePath
from typing import Literal

from torchtrim.core.units import counted, format_bytes, format_seconds
from torchtrim.core.words import listed
from torchtrim.records import Certificate, Figures, Finding, Profile, Report
from torchtrim.records.certificate import Coverage
from torchtrim.records.comparison import Side
from torchtrim.records.figures import Lever
from torchtrim.records.finding import EQUIVALENCES
from torchtrim.records.fix import Fixes, FixRecord, State
from torchtrim.records.profile import is_emulated

Tone = Literal["good", "bad", "unsure", "neutral"]

PEAKS = {"allocated": "peak", "reserved": "reserved peak", "rss": "process peak"}
_FAMILIES = {
    "1": "waiting",
    "2": "memory",
    "3": "input",
    "4": "kernels",
    "5": "growth",
    "6": "devices",
    "9": "configuration",
}
_TONES: dict[str, Tone] = {
    "BITWISE": "good",
    "ROUNDING": "good",
    "AS ASKED": "good",
    "NOT EQUAL": "bad",
    "UNDECIDED": "unsure",
}
SAFETY = {
    "BITWISE": "Every compared bit is equal.",
    "ROUNDING": "The same real function: differences shrink with the type's epsilon.",
    "AS ASKED": "A different function, as requested; everything else equals the original edited by hand.",
    "NOT EQUAL": "The compared program does not compute what the original computes: do not use it.",
    "UNDECIDED": "Whether it computes what the original computes is not shown.",
}
_BOUNDS = {
    "waits": "bound by waits",
    "host": "host-bound",
    "device": "device-bound",
    "loader": "bound by the loader",
}
_NEARLY = 0.9  # Arbitrary; a few findings that gain 90 % are a better target than all of them.
_MOST_INPUTS = 3  # Arbitrary; the sentence stays short, and JSON has all inputs.
_SMALL = 0.005  # Smaller shares would be shown as 0 %.


def tone_of(certificate: Certificate) -> Tone:
    """Return the tone of a certificate's verdict."""
    return _TONES[certificate.verdict]


def part_lines(report: Report) -> list[str]:
    """Return the parts of the smallest peak if a budget is missed, largest first."""
    if report.floor_bytes is None or not report.peak_parts:
        return []
    whole = sum(part.bytes for part in report.peak_parts) or 1
    small = [p.bytes for p in report.peak_parts[1:] if p.bytes < _SMALL * whole]
    large = report.peak_parts[: len(report.peak_parts) - len(small)]
    parts = [f"{p.what} {format_bytes(p.bytes)} ({100 * p.bytes / whole:.0f} %)" for p in large]
    parts += [f"the rest {format_bytes(sum(small))}"] if small else []
    floor = f"{format_bytes(report.floor_bytes)} ({report.floor_bytes} bytes)"
    return [f"{floor}: {', '.join(parts)}"]


def fitting_lines(report: Report) -> list[str]:
    """Return a line for each lever that would meet the missed budget: least change first, then fastest."""
    meeting = [lever for lever in report.levers if _meets(lever, report)]
    meeting.sort(key=lambda lever: EQUIVALENCES.index(lever.equivalence))
    return [_lever_line(lever, report) for lever in meeting]


def lever_lines(report: Report) -> list[str]:
    """Return a line for each other technique with the peak it would reach, fastest first."""
    return [_lever_line(lever, report) for lever in report.levers if not _meets(lever, report)]


def _meets(lever: Lever, report: Report) -> bool:
    return report.budget_bytes is not None and lever.peak_bytes <= report.budget_bytes


def _lever_line(lever: Lever, report: Report) -> str:
    original, before = report.original, peak_before(report)
    step = ""
    if original is not None and original.step_seconds and lever.step_seconds:
        step = f"step {percent(original.step_seconds, lever.step_seconds)}"
    parts = (
        lever.technique,
        format_bytes(lever.peak_bytes) + bracketed(percent(before or 0, lever.peak_bytes)),
        step,
        lever.equivalence,
        lever.source,
    )
    text = ", ".join(part for part in parts if part)
    return f"{lever.needs}: {text}" if lever.needs else text


def bracketed(text: str) -> str:
    """Put text in parentheses after a space, `" (-43 %)"`; an empty string stays empty."""
    return f" ({text})" if text else ""


def emulated_name(report: Report) -> str:
    """Return the name of the emulated device, or an empty string."""
    if not is_emulated(report.device):
        return ""
    return f" on an emulated {report.device.partition(' ')[2].upper() or 'GPU'}"


def step_name(report: Report) -> str:
    """Return the name of the step time: an emulated step runs on a CPU, and takes the CPU's time."""
    return "step on this CPU" if is_emulated(report.device) else "step"


def _peaks(figures: Figures) -> dict[str, int | None]:
    return {
        "allocated": figures.peak_bytes,
        "tracked at dispatch": figures.tracked_peak_bytes,
        "reserved": figures.reserved_bytes,
        "process": figures.rss_bytes,
    }


def limited_bytes(figures: Figures | None, memory_kind: str) -> int | None:
    """Return the bytes that a budget of this kind limits."""
    name = "process" if memory_kind == "rss" else memory_kind
    return _peaks(figures)[name] if figures is not None else None


def peaks_of(figures: Figures) -> str:
    """Return all measured peaks, by name."""
    return ", ".join(f"{k} {format_bytes(v)}" for k, v in _peaks(figures).items() if v is not None)


def peak_before(report: Report) -> int | None:
    """Return the original's peak, in the kind of memory that the budget limits."""
    return limited_bytes(report.original, report.memory_kind)


def peak_after(report: Report) -> int | None:
    """Return the planned peak: measured, else predicted."""
    if report.planned is None and report.plan is not None:
        return report.plan.predicted.peak_bytes
    return limited_bytes(report.planned, report.memory_kind)


def is_idle(report: Report) -> bool:
    """Return True for a plan that changes nothing."""
    plan = report.plan
    return plan is not None and not (
        plan.techniques or plan.graphs or report.pipeline or report.planned
    )


def over_budget(report: Report) -> int:
    """Return the bytes over the budget; 0 or less if it is met or there is none."""
    after = peak_after(report)
    known = peak_before(report) if after is None else after
    if known is not None and report.estimated is not None:
        known += report.estimated.workspace_bytes
    return 0 if known is None or report.budget_bytes is None else known - report.budget_bytes


def percent(before: float, after: float) -> str:
    """Return a relative change, such as `"-43 %"`; empty if `before` is 0."""
    return f"{100 * (after / before - 1):+.0f} %" if before else ""


def step_change(original: Figures, planned: Figures) -> str:
    """Return the change of the step time; a change within the spread of the steps is not significant.

    It has no interval: the spread of one run's steps says nothing about other runs.
    """
    if not original.step_seconds or not planned.step_seconds:
        return ""
    ratio = planned.step_seconds / original.step_seconds
    relative = sum(f.spread_seconds / 2 / f.step_seconds for f in (original, planned))
    change = f"{percent(original.step_seconds, planned.step_seconds)}, one run each"
    return change if abs(ratio - 1) > ratio * relative else f"no significant change, {change}"


def count_of(findings: Sequence[Finding]) -> str:
    """Return the number of findings, such as `"5 findings"` or `"No findings"`."""
    return counted(len(findings), "finding") if findings else "No findings"


def families(findings: Sequence[Finding]) -> str:
    """Return the number of findings by family, such as `"3 memory, 2 waiting; 2 with a fix"`."""
    counted = Counter(_FAMILIES.get(f.code[2:3], "other") for f in findings)
    counts = ", ".join(f"{count} {family}" for family, count in counted.most_common())
    fixes = sum(1 for f in findings if f.fix and f.fix.kind == "code")
    return counts + (f"; {fixes} with a fix" if fixes else "")


def known(value: float | None, form: Callable[[float], str]) -> str:
    """Format a figure; return an empty string if it is unknown."""
    return "" if value is None else form(value)


def price(finding: Finding) -> str:
    """Return the price of a finding, such as `"3.20 ms, 120 MiB modelled"`; measured prices name no
    source."""
    seconds = None if finding.price_ms is None else finding.price_ms / 1e3
    figures = [known(seconds, format_seconds), known(finding.price_bytes, format_bytes)]
    if finding.code.startswith("TT2"):
        figures.reverse()
    prices = [figure for figure in figures if figure]
    source = f" {finding.source}" if prices and finding.source != "measured" else ""
    return ", ".join(prices) + source


def waiting_lines(report: Report) -> list[str]:
    """Return the total cost of waits, and the smallest set of findings that accounts for nearly all of it."""
    waiting = report.waiting
    if waiting is None:
        return []

    all_saves, step, busy = (
        format_seconds(ms / 1e3)
        for ms in (waiting.all_saves_ms, waiting.step_ms, waiting.device_busy_ms)
    )
    gain = f"{all_saves} less without waits" if waiting.all_saves_ms else ""
    bound = _BOUNDS.get(waiting.bound)
    figures = (
        f"step {step}, {gain or 'no gain expected from removing waits'}, device busy {busy}"
        f"{f', {bound}' if bound else ''}"
    )
    lines = [f"{waiting.source}, {waiting.device.upper()}: {figures}"]
    if worst := worst_waits(report):
        lines.append("{} of it from {}".format(*worst))
    return lines


def worst_waits(report: Report) -> tuple[str, str] | None:
    """Return the time and the places of the few findings that account for nearly all waits."""
    waiting = report.waiting
    if waiting is None or not waiting.all_saves_ms:
        return None
    near = [one for one in waiting.sets if one.saves_ms >= _NEARLY * waiting.all_saves_ms]
    if not near:
        return None
    best = min(near, key=lambda one: len(one.findings))
    sites = ", ".join(_site(report.findings[number]) for number in best.findings)
    return format_seconds(best.saves_ms / 1e3), sites


def waits_of(report: Report) -> str:
    """Return `"waits cost 1.52 ms of a step of 11.9 ms on A10G, modelled"`; empty if they cost nothing."""
    waiting = report.waiting
    if waiting is None or not waiting.all_saves_ms:
        return ""
    cost, step = (format_seconds(ms / 1e3) for ms in (waiting.all_saves_ms, waiting.step_ms))
    return f"waits cost {cost} of a step of {step} on {waiting.device.upper()}, {waiting.source}"


def stream_rows(report: Report) -> list[tuple[str, str, str]]:
    """Return rows on a stream's frames: name, measured value, value without bounds (empty if not run)."""
    stream = report.stream
    if stream is None:
        return []
    rows = [
        (
            "growth a frame",
            format_bytes(stream.growth_bytes),
            known(stream.unbounded_growth_bytes, format_bytes),
        ),
        (
            "time per frame, while watched",
            format_seconds(stream.frame_seconds),
            known(stream.unbounded_frame_seconds, format_seconds),
        ),
        ("growth of the process per frame", format_bytes(stream.process_growth_bytes), ""),
    ]
    if stream.max_growth_bytes is not None:
        rows.insert(1, ("allowed a frame", format_bytes(stream.max_growth_bytes), ""))
    return rows


def fix_lines(report: Report) -> list[str]:
    """Return a line with the number of fixes by state and their proof, then a line for each fix."""
    fixes = report.fixes
    if fixes is None:
        return []
    states = fix_states(fixes)
    counts = Counter(fix.state for fix in fixes.places)
    if not counts and fixes.syncs_before:
        return ["none: no known fix for the host-device syncs in the script's own source"]
    if not counts:
        none = "none: the script's own source has no host-device syncs"
        return [none] if report.plan is None else []
    parts = [f"{counts[state]} {word}" for state, word in states.items() if counts[state]]
    parts += ["nothing written"] if fixes.diff and not fixes.written else []
    parts.append(f"syncs {fixes.syncs_before} -> {fixes.syncs_after} a step")
    proof = fixes.certificate
    if proof and proof != report.certificate:
        difference = difference_figure(proof.largest_difference)
        parts.append(f"{proof.verdict}, largest difference {difference}")
    lines = [", ".join(parts)]
    lines += [f"write them: {fixes.command}"] if fixes.command and not fixes.written else []
    return [*lines, *(_fix_line(fix, states, home(report)) for fix in fixes.places)]


def fix_states(fixes: Fixes) -> dict[State, str]:
    """Return the word for each state of a fix; "written" only if it is in the files."""
    return {
        "applied": "written" if fixes.written else "suggested",
        "suggested": "suggested as unsafe",
        "refused": "refused",
        "reverted": "reverted",
    }


def _fix_line(fix: FixRecord, states: Mapping[State, str], folder: str) -> str:
    left = "" if fix.syncs_after is None else f" -> {fix.syncs_after}"
    what = f"{fix.name} at {place(fix.path, fix.line, folder)}"
    text = f"{states[fix.state]}: {what}, {fix.equivalence}, syncs {fix.syncs_before}{left}"
    return f"{text}: {fix.reason or fix.kinds}" if fix.reason or fix.kinds else text


def diff_lines(report: Report) -> list[str]:
    """Return the changed lines of the fixes' diff, and its hunk headers."""
    diff = report.fixes.diff if report.fixes else ""
    return [line for line in diff.splitlines() if line.startswith(("+", "-", "@@"))]


def _site(finding: Finding) -> str:
    name = PurePath(finding.path.replace("\\", "/")).name
    return f"{finding.code} {name}:{finding.line}" if name else finding.code


def home(record: Report | Profile | Side) -> str:
    """Return the folder that places are relative to: the project's, else the script's, or an empty string."""
    folder = record.project or str(PurePath(record.script).parent)
    return "" if folder in (".", "/") else folder


def place(path: str, line: int, home: str = "") -> str:
    """Return `path:line`, shortened relative to `home` or to the installed packages."""
    text = path.replace("\\", "/").rpartition("site-packages/")[2]
    folder = home.replace("\\", "/").rstrip("/")
    text = text.removeprefix(folder + "/") if folder else text
    return f"{text}:{line}" if text and line else text


def difference_of(certificate: Certificate, home: str = "") -> str:
    """Return the first difference, such as `"gradient of layers.3 at model.py:42"`."""
    first = certificate.first_difference
    if first is None:
        return ""
    where = place(first.path, first.line, home)
    text = f"{first.op} of {first.module or 'the step'}" + (f" at {where}" if where else "")
    there = place(first.other_path, first.other_line, home)
    if there and (first.other_operator, there) != (first.operator, where):
        ran = first.other_operator or "it"
        text += f"; {first.operator or 'nothing'} there, {ran} at {there} in the other"
    elif first.operator:
        text += f", where {first.operator} differs"
    return text


def difference_figure(value: float | None) -> str:
    """Format a relative difference for people."""
    return "not measured" if value is None else "0" if value == 0 else f"{value:.1e}"


def certificate_lines(certificate: Certificate) -> list[str]:
    """Return the verdict, its coverage, the compared quantities, and the reason if they are not equal."""
    lines = [proof_sentence(certificate)]
    if certificate.otherwise:
        lines.append(f"Built otherwise: {certificate.otherwise}")
    if certificate.coverage is not None:
        lines.append(coverage_sentence(certificate.coverage))
    if certificate.assumes:
        lines.append(
            f"Assumed of later steps, and seen by no check: {'; '.join(certificate.assumes)}"
        )
    lines.append(
        f"compared {', '.join(certificate.compared) or 'nothing'}: "
        f"largest difference {difference_figure(certificate.largest_difference)}, "
        f"noise {difference_figure(certificate.noise)}, "
        f"seeded by {'the script' if certificate.seeds == 'script' else certificate.seeds}"
    )
    trusted = certificate.asked is None and tone_of(certificate) == "good"
    needed = certificate.asked is not None or certificate.reason
    return [*lines, certificate.reason] if needed and not trusted else lines


def proof_sentence(certificate: Certificate) -> str:
    """Return the verdict in words.

    For example `"BITWISE: every parameter of 5 steps, every loss and gradient of 4 of them: identical"`; the
    recorded step is compared by the state that it leaves.
    """
    steps = counted(certificate.steps, "step")
    means = _MEANS.get(certificate.verdict)
    named = list(_compared(certificate)) if means else []
    if not named:
        return f"{certificate.verdict}: {steps} compared"
    groups = groupby(sorted(named, key=lambda one: -one[1]), key=lambda one: one[1])
    parts = [(count, f"every {listed([name for name, _ in group])}") for count, group in groups]
    (most, states), *fewer = parts
    said = [f"{states} of {counted(most, 'step')}"]
    said += [f"{what} of {count} of them" for count, what in fewer]
    return f"{certificate.verdict}: {', '.join(said)}: {means}"


_MEANS = {
    "BITWISE": "identical",
    "ROUNDING": "equal up to rounding",
    "AS ASKED": "as in the original edited by hand",
}
_COUNTED = re.compile(r"\d+ (.+) x (\d+) steps?")
_QUANTITIES = {
    "loss": "losses",
    "output": "outputs",
    "gradient": "gradients",
    "parameter": "parameters",
    "optimizer state": "optimizer states",
}
"""The quantities that a proof names; the others are only counted."""


def _compared(certificate: Certificate) -> Iterator[tuple[str, int]]:
    """Yield the name of each compared quantity, and the number of steps."""
    counts = filter(None, map(_COUNTED.fullmatch, certificate.compared))
    steps = {match[1]: int(match[2]) for match in counts}
    for one, many in _QUANTITIES.items():
        if count := steps.get(one) or steps.get(many):
            yield one, count


def coverage_sentence(coverage: Coverage) -> str:
    """Return the coverage of a verdict: `"Shown for Net: float32[8, 3] (batch 8), in training, 5 steps"`."""
    inputs = coverage.inputs[:_MOST_INPUTS]
    more = len(coverage.inputs) - len(inputs)
    shown = "; ".join(inputs) + (f" and {more} more" if more else "")
    batches = ", ".join(map(str, coverage.batch_sizes))
    batch = bracketed(f"batch {batches}") if batches else ""
    modes = " and ".join(coverage.modes) or "no call of a module"
    steps = counted(coverage.steps, "step")
    what = f"{shown}{batch}, in {modes}, {steps}" if shown else f"{modes}, {steps}"
    device = f" on {coverage.device}" if coverage.device else ""
    several = len(coverage.processes) > 1
    ranks = f", on each of ranks {', '.join(map(str, coverage.processes))}" if several else ""
    return f"Shown for {what}{device}{ranks}; not for other shapes, types or modes"


def weakest_verdict(report: Report) -> str:
    """Return the verdict; BITWISE only if everything applied is bitwise equal for all inputs."""
    assert report.certificate is not None
    applied = [one.equivalence for one in report.plan.techniques] if report.plan else []
    if report.fixes is not None and (report.plan is None or report.fixes.written):
        applied += [one.equivalence for one in report.fixes.places if one.state == "applied"]
    rounds = report.certificate.verdict == "BITWISE" and any(one != "BITWISE" for one in applied)
    return "ROUNDING" if rounds else report.certificate.verdict
