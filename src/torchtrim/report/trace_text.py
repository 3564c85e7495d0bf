"""Renders the analysis of a trace on a terminal: counts, sites, sets, the bound, the next command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchtrim.core.units import counted
from torchtrim.records.trace import TraceJob, TraceReport, TraceSite
from torchtrim.report.blocks import SCREEN, WIDEST, Column, TextTable, labelled, show
from torchtrim.report.safe import clean, keep_left, keep_right, noting_cuts

_LABEL = 10  # The longest label and two blanks.
_FEWEST_NOTES = 1  # One note is printed even if the screen is full.
_FIGURES = 30  # The columns of figures, with their gaps and a margin.
_BOUND = {
    "host": "the host: it launches work more slowly than the device executes it",
    "device": "the device: its own work takes all of the time",
    "waits": "waits: host and device take turns, and would overlap without them",
    "loader": "the data loader: the program is in it while the device is idle",
    "mixed": "neither alone: host and device each take most of the time",
    "unknown": "unknown: the trace cannot be replayed",
}


def render(report: TraceReport, console: Console, *, top: int, next_command: str | None) -> None:
    """Print the report, within a screen of 24 lines if `top` sites leave room."""
    width = max(40, min(console.width, WIDEST))
    with noting_cuts() as cuts:
        head = [*_counts(report, width), *_ranks(report, width)]
        table = list(_table(report, top, width))
        sets = list(_sets(report, width))
        end = [*_labelled("bound", _BOUND[report.bound], width)]
    if cuts:
        end.append(Text(" " * _LABEL + "cut texts are whole in --json", "dim"))
    if next_command:
        command = Text(keep_left(clean(next_command), max(width, 200)), "bold cyan")
        end.append(Text("next".ljust(_LABEL), "bold").append(command))
    room = SCREEN - len(head) - len(table) - len(sets) - len(end)
    show((*head, *table, *sets, *_notes(report.notes, width, room), *end), console)


def _counts(report: TraceReport, width: int) -> Iterator[Text]:
    word, style = ("WAITS", "bold red") if report.waits else ("NO WAITS", "bold green")
    copies = counted(report.blocking_copies, "blocking copy", "blocking copies")
    parts = [counted(report.sync_calls, "sync call"), copies]
    if report.device_syncs:
        count = sum(site.count for site in report.device_syncs)
        parts.append(counted(count, "device-wide sync"))
    steps = f" in {report.steps} steps" if report.steps > 1 else ""
    yield Text(word, style).append(Text(f"  {', '.join(parts)}{steps}", ""))
    share = report.device_busy_ms / report.span_ms if report.span_ms else 0.0
    replayed = ""
    if report.replay_ms is not None and report.span_ms:
        error = report.replay_ms / report.span_ms - 1
        replayed = f"; the replay takes {report.replay_ms:,.1f} ms ({error:+.1%})"
    device = f" on {report.device}" if report.device else ""
    yield from _labelled("took", f"{report.span_ms:,.1f} ms{device}{replayed}", width)
    times = (
        f"device busy {report.device_busy_ms:,.1f} ms ({share:.0%}), "
        f"host waiting {report.host_waiting_ms:,.1f} ms"
    )
    if report.loader_ms >= 0.01 * report.span_ms:
        times += f", in the data loader {report.loader_ms:,.1f} ms"
    yield from _labelled("of it", times, width)


def _ranks(report: TraceReport, width: int) -> Iterator[Text]:
    if report.ranks:
        each = ", ".join(
            f"{one.rank if one.rank is not None else Path(one.file).name}: {one.waits}"
            for one in report.ranks
        )
        yield from _labelled("ranks", f"waits of each rank: {each}", width)
    if report.job is not None:
        yield from _labelled("together", _together(report.job), width)


def _together(job: TraceJob) -> str:
    many = counted(job.collectives, "collective")
    worst = max(job.ranks, key=lambda one: one.made_others_wait_ms)
    late = f"rank {worst.rank} joins last, and the others wait {worst.made_others_wait_ms:,.1f} ms for it"
    if job.straggler is None:
        late = "no rank keeps the others waiting"
    exposed = ", ".join(f"{one.rank}: {one.exposed_ms:,.1f}" for one in job.ranks)
    return f"{many} matched; {late}; exposed communication by rank, ms: {exposed}"


def _table(report: TraceReport, top: int, width: int) -> Iterator[Text]:
    every = (*report.sites, *report.device_syncs)
    if not every:
        return
    room = width - _FIGURES
    head = "  site"
    if any(site.path and not (site.exact or site.lines) for site in every[:top]):
        head += " (N+: in the function from line N)"
    columns = (
        Column(head=head, width=room, gap=0),
        Column(head="count", width=5, gap=1, right=True),
        Column(head="wait ms", width=9, gap=1, right=True),
        Column(head="alone gains", width=12, gap=1, right=True),
    )
    numbered = [(str(i + 1), site) for i, site in enumerate(report.sites)]
    numbered += [("d", site) for site in report.device_syncs]
    yield from TextTable(columns, [_row(*one, room) for one in numbered[:top]]).lines(width)
    if len(numbered) > top:
        rest = sum(site.wait_ms for _, site in numbered[top:])
        yield Text(f"   +{len(numbered) - top} more sites, {rest:,.3f} ms: --top", "dim")


def _row(number: str, site: TraceSite, room: int) -> tuple[str, ...]:
    gains = "-" if site.saves_alone_ms is None else f"{site.saves_alone_ms:,.3f}"
    place = f"{number:>2} {keep_right(_place(site), room - 3)}"
    return place, str(site.count), f"{site.wait_ms:,.3f}", gains


def _place(site: TraceSite) -> str:
    op = site.op.removeprefix("aten::")
    back = " (backward)" if site.phase == "backward" else ""
    if not site.path:
        within = f"{site.within}: " if site.within and site.within != site.op else ""
        return clean(f"{within}{op}{back}")
    lines = "/".join(map(str, site.lines[:3])) if site.lines else str(site.line)
    named = lines if site.exact or site.lines else f"{lines}+"
    return clean(f"{site.path}:{named} {site.function} {op}{back}")


def _sets(report: TraceReport, width: int) -> Iterator[Text]:
    if report.replay_ms is None or not report.sites:
        return
    if not report.sets:
        yield from _labelled("gains", "no gain expected from removing any or all of these", width)
        return
    label = "gains"
    for one in report.sets:
        names = "+".join(str(number + 1) for number in one.sites)
        if len(one.sites) == len(report.sites) > 1:
            names = "all"
        share = one.saves_ms / report.span_ms if report.span_ms else 0.0
        yield from _labelled(label, f"{one.saves_ms:,.3f} ms ({share:.1%}) without {names}", width)
        label = ""


def _notes(notes: Sequence[str], width: int, room: int) -> Iterator[Text]:
    shown = 0
    for i, note in enumerate(notes):
        lines = list(_labelled("note" if i == 0 else "", note, width))
        if i >= _FEWEST_NOTES and shown + len(lines) > room - 1:
            yield Text(" " * _LABEL + f"+{len(notes) - i} more notes, see --json", "dim")
            return
        shown += len(lines)
        yield from lines


def _labelled(label: str, text: str, width: int) -> Iterator[Text]:
    for line in labelled(label, [clean(text)], width, indent=_LABEL, lines=3):
        line.style = "bold"
        yield line
