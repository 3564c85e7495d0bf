"""`torchtrim diagnose`: find wasted memory and time in a script's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import (
    PriceLimit,
    Verb,
    amount,
    orders_streams,
    request_of,
    runs_script,
    script_of,
    writes,
)
from torchtrim.cli.output import command_for, folder_for, followed, gate_text, show, write_files
from torchtrim.cli.progress import progress
from torchtrim.core.isolation import failures
from torchtrim.core.units import format_apart, parse_bytes
from torchtrim.errors import UsageError

if TYPE_CHECKING:
    from torchtrim.api import Result, Site
    from torchtrim.records.allow import PassedLimit
    from torchtrim.records.finding import Finding
    from torchtrim.records.report import Report


_CAPTURE = "TT402"
WAITS = ("TT101", "TT102", "TT103", "TT104")


def checked_price(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Return `--fail-on`. Raises `UsageError` unless it is a time or an amount of memory."""
    if value is not None:
        PriceLimit.of(value)
    return value


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """Limits on a report; None: no limit."""

    syncs: int | None = None
    price: PriceLimit | None = None
    peak: int | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> GateLimits:
        """Return the limits that the options set. Raises `UsageError` for an unreadable one."""
        price, peak = options["fail_on"], options["max_peak"]
        return cls(
            syncs=options["max_syncs"],
            price=PriceLimit.of(price) if price else None,
            peak=parse_bytes(peak) if peak is not None else None,
        )

    def over(self, report: Report, counted: Iterable[Finding]) -> tuple[PassedLimit, ...]:
        """Return the exceeded limits, given the findings that count: those not on the allow-list."""
        from torchtrim.records.allow import PassedLimit

        if report.original is None:
            raise UsageError("the step was not measured, so its limits cannot be checked.")
        every, over = tuple(counted), []
        waits = tuple(found for found in every if found.code in WAITS)
        count = sum(found.count_per_step for found in waits)
        if self.syncs is not None and count > self.syncs:
            waiting = f"{count} wait{'' if count == 1 else 's'} a step"
            limit = f"{waiting}, --max-syncs {self.syncs}"
            over.append(PassedLimit(limit=limit, findings=waits))
        costly = tuple(found for found in every if self._is_costly(found))
        if self.price is not None and costly:
            number = f"{len(costly)} finding{'' if len(costly) == 1 else 's'}"
            limit = f"{number}, --fail-on {self.price.text}"
            over.append(PassedLimit(limit=limit, findings=costly))
        peak = report.original.peak_bytes
        if self.peak is not None and peak > self.peak:
            seen, most = format_apart(peak, self.peak)
            limit = f"peak {seen}, --max-peak {most}"
            over.append(PassedLimit(limit=limit))
        return tuple(over)

    def unchecked(self) -> tuple[str, ...]:
        """Return the limits that could not be checked because a rule failed."""
        failed = [one.name for one in failures("rule")]
        waits = ", ".join(code for code in failed if code in WAITS)
        lines = []
        if self.syncs is not None and waits:
            lines.append(f"--max-syncs {self.syncs}, since {waits} failed")
        if self.price is not None and failed:
            lines.append(f"--fail-on {self.price.text}, since {', '.join(failed)} failed")
        return tuple(lines)

    def accepts(self, finding: Finding) -> bool:
        """Return True if the finding counts towards a limit; without limits, all do."""
        if self.syncs is None and self.price is None:
            return True
        return (self.syncs is not None and finding.code in WAITS) or self._is_costly(finding)

    def _is_costly(self, finding: Finding) -> bool:
        return self.price is not None and self.price.reached_by(finding)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A result checked against limits: the report lists the allowed findings, `text` is for the terminal.

    `unchecked`: limits that could not be checked because a rule failed.
    """

    result: Result
    over: tuple[PassedLimit, ...]
    unchecked: tuple[str, ...]
    text: str

    @property
    def passes(self) -> bool:
        """Return True if all limits were checked and met."""
        return not self.over and not self.unchecked

    @property
    def acceptable(self) -> bool:
        """Return True if findings exceed a limit: the allow-list could accept them."""
        return any(passed.findings for passed in self.over)


class Gate:
    """Limits and an allow-list, read before the script runs so that mistakes in them show at once."""

    def __init__(self, options: dict[str, Any], project: Path) -> None:
        from torchtrim.records.allow import FILE_NAME, load_allow

        self.limits = GateLimits.of(options)
        self.path: Path = options["allow"] or project / FILE_NAME
        self._updates: bool = options["update_allow"]
        required = options["allow"] is not None and not self._updates
        self._entries = load_allow(self.path).allow if required or self.path.exists() else ()

    def judge(self, result: Result) -> Judged:
        """Check a result against the limits; first update the allow-list if requested."""
        import msgspec

        from torchtrim.api import hold, sites

        report = result.report
        found, seen = sites(report.findings, report.project), self._seen(result)
        if self._updates:
            self._update(found, seen)
        outcome = hold(self._entries, found, seen)
        over, unchecked = self.limits.over(report, outcome.counted), self.limits.unchecked()
        notes = (*report.notes, *(f"over the limit: {passed.limit}" for passed in over))
        notes += tuple(f"not checked: {limit}" for limit in unchecked)
        report = msgspec.structs.replace(report, allowed=outcome.allowed, notes=notes)
        text = "".join(f"NOT CHECKED  {limit}\n" for limit in unchecked)
        text += gate_text(report, over, self.path.name)
        return Judged(
            result=result._replace(report=report), over=over, unchecked=unchecked, text=text
        )

    def _seen(self, result: Result) -> frozenset[str]:
        """Return the paths that ran or no longer exist; all others belong to other scripts."""
        from torchtrim.api import near

        project = result.report.project
        places = result.before.places if result.before is not None else ()
        ran = {near(place.path, project) for place in places}
        gone = {entry.path for entry in self._entries if not _is_there(Path(project, entry.path))}
        return frozenset(ran | gone | {near(f.path, project) for f in result.report.findings})

    def _update(self, found: Sequence[Site], seen: frozenset[str]) -> None:
        """Write the allow-list, unless a rule failed: its entries would be lost."""
        if failures("rule"):
            return
        from torchtrim.api import updated
        from torchtrim.records.allow import save_allow

        self._entries = updated(self._entries, found, seen, self.limits.accepts)
        save_allow(self._entries, self.path)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


@click.command(cls=Verb)
@runs_script
@orders_streams
@writes
@click.option(
    "--fail-on",
    metavar="PRICE",
    callback=checked_price,
    help="Exit 1 if a finding costs at least this: 10ms or 50MiB.",
)
@click.option(
    "--max-syncs", type=click.IntRange(0), help="Exit 1 over this many host-device syncs a step."
)
@click.option(
    "--max-peak", metavar="B", callback=amount(), help="Exit 1 if the peak is higher than this."
)
@click.option(
    "--allow",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Allow-list: findings that do not count. Default: the project's torchtrim-allow.toml.",
)
@click.option(
    "--capture",
    is_flag=True,
    help="Also find what prevents capturing the step in a CUDA graph; exit 1 if anything does.",
)
@click.option("--update-allow", is_flag=True, help="Write the findings to the allow-list.")
def command(**options: Any) -> None:
    """Show what holds the memory of SCRIPT's step, and what wastes memory and time. Changes nothing."""
    folder = folder_for(options)
    with progress("original") as tell:
        from torchtrim.api import diagnose_report

        script = script_of(options)
        gate = Gate(options, script.project)
        result = diagnose_report(
            script, request_of(options), capture=options["capture"], progress=tell
        )
    judged = gate.judge(result)
    following = _next(options, judged)
    shown = followed(judged.result, following)
    paths = write_files(shown, folder)
    click.echo(judged.text, nl=False, err=options["form"] != "text")
    show(shown, form=options["form"], next_command=following, paths=paths)
    blocked = any(one.code == _CAPTURE for one in result.report.findings)
    unknown = options["capture"] and any(one.name == _CAPTURE for one in failures("rule"))
    raise click.exceptions.Exit(0 if judged.passes and not blocked and not unknown else 1)


def _next(options: dict[str, Any], judged: Judged) -> str:
    """Suggest accepting the findings over a limit or, without any, fitting the script into a budget."""
    if not judged.acceptable:
        return command_for(options, "optimize", "--memory", "60%")
    words = [
        word
        for name in ("max_syncs", "fail_on", "max_peak", "allow")
        if options[name] is not None
        for word in (f"--{name.replace('_', '-')}", str(options[name]))
    ]
    return command_for(options, "diagnose", *words, "--update-allow")
