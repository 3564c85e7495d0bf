"""What a report says, as a row; and the page with all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
_MIB = 2**20
_HEAD = """# Public programs, as they are

`diagnose` and `optimize --memory 60%` on programs that torchtrim was not written for: unmodified, made small
by their command lines alone, with generated data, on two cores of a loaded machine. `python -m
bench.strangers` makes this page; each program, its commit and its arguments are in
`bench/strangers/programs.toml`, all figures in `bench/results`. Seconds are of one run each.

*Reached* is the measured peak of the plan, in percent of the original's; where the budget is missed it is
the smallest found. *Alone* is the script's own time for five steps.

"""
RANKS_PAGE = PAGE.with_name("programs-in-processes.md")
_RANKS = """# Public programs in several processes

`optimize --processes 4 --memory 70%` on programs that torchtrim was not written for, made small by their
command lines alone, with generated data, on two cores of a loaded machine. Where a script insists on CUDA and
NCCL, it runs on emulated devices, its groups over gloo. `python -m bench.strangers` makes this page; each
program and its arguments are in `bench/strangers/ranks.toml`.

The peak is the largest rank's. *Reached* is the measured peak of the plan, in percent of that; where the
budget is missed it is the smallest found. *Verdict* is the worst of all ranks.

"""
_RANK_COLUMNS = (
    *("program", "kind", "peak MiB", "reached", "verdict", "levers"),
    *("diagnose s", "optimize s", "findings"),
)
_COLUMNS = (
    "program",
    "kind",
    "peak MiB",
    "reached",
    "with rounding",
    "verdict",
    "levers",
    "alone s",
    "diagnose s",
    "optimize s",
    "findings",
)


def rows_of(report: dict[str, Any]) -> dict[str, Any]:
    """The facts of a report that the table wants."""
    original, planned = report["original"] or {}, report["planned"] or {}
    certificate, plan = report["certificate"] or {}, report["plan"] or {}
    codes = Counter(finding["code"] for finding in report["findings"])
    return {
        "peak_bytes": original.get("peak_bytes"),
        "step_seconds": original.get("step_seconds"),
        "by_kind": original.get("by_kind"),
        "budget_bytes": report["budget_bytes"],
        "floor_bytes": report["floor_bytes"],
        "planned_bytes": planned.get("peak_bytes"),
        "planned_seconds": planned.get("step_seconds"),
        "verdict": certificate.get("verdict"),
        "techniques": [one["name"] for one in plan.get("techniques", ())],
        "levers": [[one["technique"], one["peak_bytes"]] for one in report["levers"]],
        "findings": dict(sorted(codes.items())),
        "notes": report["notes"],
        "next": report["next"],
    }


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write the page."""
    PAGE.write_text(_HEAD + _table(_COLUMNS, [_cells(row) for row in rows]))


def write_ranks_page(rows: list[dict[str, Any]]) -> None:
    """Write the page of programs in several processes."""
    RANKS_PAGE.write_text(_RANKS + _table(_RANK_COLUMNS, [_rank_cells(row) for row in rows]))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in rows)


def _rank_cells(row: dict[str, Any]) -> list[str]:
    cells = dict(zip(_COLUMNS, _cells(row), strict=True))
    return [cells[name] for name in _RANK_COLUMNS]


def _cells(row: dict[str, Any]) -> list[str]:
    verbs = row["verbs"]
    seen, fitted = verbs.get("diagnose", {}), verbs.get("optimize", {})
    return [
        row["name"],
        row["kind"],
        _mib(fitted.get("peak_bytes") or seen.get("peak_bytes")),
        _reached(fitted),
        _reached(verbs.get("optimize, rounding", {})),
        _verdict(fitted),
        ", ".join(fitted.get("techniques", ())) or "-",
        _seconds(row.get("alone", {})),
        _seconds(seen),
        _seconds(fitted),
        ", ".join(f"{code} {count}" for code, count in seen.get("findings", {}).items()) or "-",
    ]


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / _MIB:.1f}"


def _seconds(ended: dict[str, Any]) -> str:
    if not ended:
        return "-"
    return (
        f"{ended['seconds']:.0f}" if ended["code"] is not None else f"over {ended['seconds']:.0f}"
    )


def _reached(fitted: dict[str, Any]) -> str:
    whole, used = fitted.get("peak_bytes"), fitted.get("planned_bytes")
    if not whole:
        return "-"
    return f"{100 * (used or whole) / whole:.0f} %"


def _verdict(fitted: dict[str, Any]) -> str:
    if not fitted.get("peak_bytes"):
        return fitted.get("said", "-").removeprefix("error: ").replace("|", "/")[:80]
    if not fitted["techniques"]:
        return "nothing lowers it" if fitted["floor_bytes"] else "fits as it is"
    missed = ", budget missed" if fitted["floor_bytes"] else ""
    return f"{fitted['verdict']}{missed}"
