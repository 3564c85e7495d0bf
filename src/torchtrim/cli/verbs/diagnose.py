"""`torchtrim diagnose`: what is wasteful in a script's step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchtrim.cli.options import (
    Verb,
    amount,
    orders_streams,
    request_of,
    runs_script,
    script_of,
    writes,
)
from torchtrim.cli.output import command_for, folder_for, gate_text, progress, show, write_files
from torchtrim.core.isolation import failures
from torchtrim.core.units import check_bytes, format_bytes, parse_bytes
from torchtrim.errors import UsageError

if TYPE_CHECKING:
    from torchtrim.api import Result, Site
    from torchtrim.records.allow import PassedLimit
    from torchtrim.records.finding import Finding
    from torchtrim.records.report import Report


_CAPTURE = "TT402"


WAITS = ("TT101", "TT102", "TT103", "TT104")
_MILLISECONDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*ms\s*")


def checked_price(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """The price of `--fail-on`. Raises `UsageError` for what is neither a time nor an amount of memory."""
    if value is not None and not _MILLISECONDS.fullmatch(value):
        check_bytes(value)
    return value


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """What a report must not pass. None is no limit."""

    syncs: int | None = None
    price: str | None = None
    ms: float | None = None
    bytes: int | None = None
    peak: int | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> GateLimits:
        """The limits that the options set. Raises `UsageError` for what cannot be read."""
        price, peak = options["fail_on"], options["max_peak"]
        match = _MILLISECONDS.fullmatch(price or "")
        return cls(
            syncs=options["max_syncs"],
            price=price,
            ms=float(match[1]) if match else None,
            bytes=parse_bytes(price) if price and not match else None,
            peak=parse_bytes(peak) if peak is not None else None,
        )

    def over(self, report: Report, counted: Iterable[Finding]) -> tuple[PassedLimit, ...]:
        """The limits that are passed by what counts: the findings that no list allows."""
        if report.original is None:
            raise UsageError("the step was not measured, so there is nothing to hold to a limit.")
        every = tuple(counted)
        found = (self._waits(every), self._dear(every), self._high(report.original.peak_bytes))
        return tuple(one for one in found if one is not None)

    def unchecked(self) -> tuple[str, ...]:
        """The limits that cannot be checked, since a rule failed: what it looks for may be there."""
        failed = [one.name for one in failures("rule")]
        waits = ", ".join(code for code in failed if code in WAITS)
        found = {
            f"--max-syncs {self.syncs}": waits if self.syncs is not None else "",
            f"--fail-on {self.price}": ", ".join(failed) if self.price is not None else "",
        }
        return tuple(f"{limit}, since {codes} failed" for limit, codes in found.items() if codes)

    def accepts(self, finding: Finding) -> bool:
        """Whether a finding counts towards a limit; without any, all do."""
        if self.syncs is None and self.price is None:
            return True
        return (self.syncs is not None and finding.code in WAITS) or self._is_dear(finding)

    def _waits(self, counted: Sequence[Finding]) -> PassedLimit | None:
        from torchtrim.records.allow import PassedLimit

        waits = tuple(found for found in counted if found.code in WAITS)
        count = sum(found.count_per_step for found in waits)
        if self.syncs is None or count <= self.syncs:
            return None
        waiting = f"{count} wait{'' if count == 1 else 's'} a step"
        return PassedLimit(limit=f"{waiting}, --max-syncs {self.syncs}", findings=waits)

    def _dear(self, counted: Sequence[Finding]) -> PassedLimit | None:
        from torchtrim.records.allow import PassedLimit

        dear = tuple(found for found in counted if self._is_dear(found))
        count = f"{len(dear)} finding{'' if len(dear) == 1 else 's'}"
        return (
            PassedLimit(limit=f"{count}, --fail-on {self.price}", findings=dear) if dear else None
        )

    def _is_dear(self, finding: Finding) -> bool:
        by_time = self.ms is not None and (finding.price_ms or 0) >= self.ms
        return by_time or (self.bytes is not None and (finding.price_bytes or 0) >= self.bytes)

    def _high(self, peak: int) -> PassedLimit | None:
        from torchtrim.records.allow import PassedLimit

        if self.peak is None or peak <= self.peak:
            return None
        return PassedLimit(limit=f"peak {format_bytes(peak)}, --max-peak {format_bytes(self.peak)}")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A result held to limits: the report lists the allowed findings, `said` is for the terminal.

    `unchecked` are limits of which nobody knows whether they are passed.
    """

    result: Result
    over: tuple[PassedLimit, ...]
    unchecked: tuple[str, ...]
    said: str

    @property
    def passes(self) -> bool:
        """Whether all limits were checked and none is passed."""
        return not self.over and not self.unchecked

    @property
    def acceptable(self) -> bool:
        """Whether the allow-list could take what is over."""
        return any(passed.findings for passed in self.over)


class Gate:
    """Limits and an allow-list, read before the script runs so that a mistake in them costs nothing."""

    def __init__(self, options: dict[str, Any], project: Path) -> None:
        from torchtrim.records.allow import FILE_NAME, load_allow

        self.limits = GateLimits.of(options)
        self.path: Path = options["allow"] or project / FILE_NAME
        self._updates: bool = options["update_allow"]
        asked = options["allow"] is not None and not self._updates
        self._entries = load_allow(self.path).allow if asked or self.path.exists() else ()

    def judge(self, result: Result) -> Judged:
        """Hold a result to the limits; first write the allow-list where that is asked."""
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
        said = "".join(f"NOT CHECKED  {limit}\n" for limit in unchecked)
        said += gate_text(report, over, self.path.name)
        return Judged(
            result=result._replace(report=report), over=over, unchecked=unchecked, said=said
        )

    def _seen(self, result: Result) -> frozenset[str]:
        """Paths that the script ran or that are gone: entries of others are another script's."""
        from torchtrim.api import near

        project = result.report.project
        places = result.before.places if result.before is not None else ()
        ran = {near(place.path, project) for place in places}
        gone = {entry.path for entry in self._entries if not _is_there(Path(project, entry.path))}
        return frozenset(ran | gone | {near(f.path, project) for f in result.report.findings})

    def _update(self, found: Sequence[Site], seen: frozenset[str]) -> None:
        """Write the allow-list; not where a rule failed, since what that would find would go from it."""
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
    help="Exit 1 if a finding costs 10ms, 50MiB or more.",
)
@click.option("--max-syncs", type=click.IntRange(0), help="Exit 1 over this many waits a step.")
@click.option("--max-peak", metavar="B", callback=amount(), help="Exit 1 if the peak is over this.")
@click.option(
    "--allow",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Findings that count for no limit; the project's torchtrim-allow.toml by default.",
)
@click.option(
    "--capture",
    is_flag=True,
    help="Also what keeps the step from being captured in a CUDA graph; exit 1 if anything does.",
)
@click.option("--update-allow", is_flag=True, help="Write what was found into that file.")
def command(**options: Any) -> None:
    """Find what wastes memory and time in SCRIPT's step."""
    from torchtrim.api import diagnose_report

    script = script_of(options)
    gate = Gate(options, script.project)
    folder = folder_for(options)
    with progress() as tell:
        result = diagnose_report(
            script, request_of(options), capture=options["capture"], progress=tell
        )
    judged = gate.judge(result)
    paths = write_files(judged.result, folder)
    click.echo(judged.said, nl=False, err=options["form"] != "text")
    show(judged.result, form=options["form"], next_command=_next(options, judged), paths=paths)
    blocked = any(one.code == _CAPTURE for one in result.report.findings)
    unknown = options["capture"] and any(one.name == _CAPTURE for one in failures("rule"))
    raise click.exceptions.Exit(0 if judged.passes and not blocked and not unknown else 1)


def _next(options: dict[str, Any], judged: Judged) -> str:
    """How to accept what is over; where there is nothing to accept, how to fit the script."""
    if not judged.acceptable:
        return command_for(options, "optimize", "--memory", "60%")
    words = [
        word
        for name in ("max_syncs", "fail_on", "max_peak", "allow")
        if options[name] is not None
        for word in (f"--{name.replace('_', '-')}", str(options[name]))
    ]
    return command_for(options, "diagnose", *words, "--update-allow")
