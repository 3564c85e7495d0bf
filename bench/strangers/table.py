"""What a report says, as a row; and the page with all rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
LASTING = "parameter", "buffer", "gradient", "optimizer_state"
_HALF = 0.5
_MIB = 2**20
_SET_BY = re.compile(
    r"set by ((?:aten::\w+|\w+ of \S+) in the \w+(?: of [\w.]+)?|what was alive before the step"
    r"|memory from before the step)"
)
_FIRST = re.compile(r"a plan predicted ([\d.]+) MiB and measured ([\d.]+) MiB")
_MISSED_COLUMNS = "program", "peak MiB", "state", "inputs", "smallest", "set by"
_TRAINED_COLUMNS = "program", "levers", "backward passes", "equal"
_HEAD = """# Public programs, unmodified

`diagnose` and `optimize --memory 60%` on programs that torchtrim was not written for: unmodified, made small
only by their command lines, with generated data, on two cores of busy machines. `python -m
bench.strangers` writes this page; each program, its commit and its arguments are in
`bench/strangers/programs.toml`, all figures in `bench/results`. Times are from one run each.

*Reached* is the measured peak of the plan, in percent of the original's; if the budget is missed it is the
smallest found. *Alone* is the script's own time for five steps. *State* is the share of parameters,
buffers, gradients and optimizer state in the peak, *inputs* the share of batches and other tensors that the
script holds from before the step, such as a dataset. Plans lower neither, except gradients.

Forty more were [named before they were run](programs-unseen.md).

"""
_MISSED = """
## Programs that miss 60 % although state takes less than half

"""
_TRAINED = """
## Trained on under the plan

Each program ran for 200 backward passes unplanned and under its plan, in separate processes from the same
seed (`python -m bench.strangers.trained`). *Equal* is the number of consecutive losses that agree bit
for bit. llama2.c ran without its own `torch.compile`, since a plan runs compiled functions eagerly.

"""
RANKS_PAGE = PAGE.with_name("programs-in-processes.md")
_RANKS = """# Public programs in several processes

`optimize --processes 4 --memory 70%` on programs that torchtrim was not written for, made small only by their
command lines, with generated data, on two cores of a busy machine. Scripts that insist on CUDA and
NCCL run on emulated devices, their groups over gloo. `python -m bench.strangers` writes this page; each
program and its arguments are in `bench/strangers/ranks.toml`.

The peak is the largest rank's. *Reached* is the measured peak of the plan, in percent of that; if the
budget is missed it is the smallest found. *Verdict* is the worst of all ranks.

"""
UNSEEN_PAGE = PAGE.with_name("programs-unseen.md")
_UNSEEN = """# Programs named before they were run

`optimize --memory 60%` on public programs that `bench/strangers/unseen.toml` named with their commits before
any of them was run, made small by their command lines or by their own constants, with generated data, on two
cores of a busy machine. Those that insist on CUDA ran on an emulated device. `python -m bench.strangers
--programs unseen` writes this page.

*Reached* is the measured peak of the plan, in percent of the original's; if the budget is missed it is the
smallest found. *Predicted* is how far the plan's predicted peak is from the measured one. *State* and
*inputs* are as on [public programs](programs.md).

"""
_UNSEEN_TRAINED = """
## Trained on under the plan

For 200 backward passes, or those of 40 seconds, unplanned and under the plan, in separate processes from the
same seed. *Equal* is the number of consecutive losses that agree bit for bit.

"""
_RAN_COLUMNS = (
    *("program", "device", "peak MiB", "state", "inputs", "reached", "with rounding"),
    *("verdict", "levers", "predicted"),
)
_RANK_COLUMNS = (
    *("program", "kind", "peak MiB", "reached", "verdict", "levers"),
    *("diagnose s", "optimize s", "findings"),
)
_COLUMNS = (
    "program",
    "kind",
    "peak MiB",
    "state",
    "inputs",
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
        "predicted_bytes": (plan.get("predicted") or {}).get("peak_bytes"),
        "planned_seconds": planned.get("step_seconds"),
        "verdict": certificate.get("verdict"),
        "techniques": [one["name"] for one in plan.get("techniques", ())],
        "levers": [[one["technique"], one["peak_bytes"]] for one in report["levers"]],
        "findings": dict(sorted(codes.items())),
        "notes": report["notes"],
        "next": report["next"],
    }


def write_page(rows: list[dict[str, Any]], trained: list[dict[str, Any]]) -> None:
    """Write the page."""
    missed = [row for row in rows if _is_lean(row) and not _met(row)]
    PAGE.write_text(
        f"{_HEAD}{_machines(rows)}\n{_summary(rows)}\n\n"
        + _table(_COLUMNS, [_cells(row) for row in rows])
        + _MISSED
        + _table(_MISSED_COLUMNS, [_missed_cells(row) for row in missed])
        + _TRAINED
        + _table(_TRAINED_COLUMNS, [_trained_cells(row) for row in trained])
    )


def _machines(rows: Sequence[dict[str, Any]]) -> str:
    """Which programs ran on which machine; those of the most are not named."""
    on: dict[str, list[str]] = {}
    for row in rows:
        on.setdefault(row["machine"], []).append(row["name"])
    most = max(on, key=lambda one: len(on[one]))
    lines = [f"On an {most} ran all that are not named here.\n"]
    lines += [f"On an {one}: {'; '.join(on[one])}.\n" for one in on if one != most]
    return "".join(lines)


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many reach the budget, as sentences."""
    ran = [row for row in rows if _fitted(row).get("peak_bytes")]
    lean = [row for row in ran if _is_lean(row)]
    free = [row for row in lean if _share(row, (*LASTING, "input")) < _HALF]
    met = [row for row in lean if _met(row)]
    same = [row for row in met if _fitted(row)["code"] == 0]
    left = [row for row in free if _met(row)]
    rounded, both = len(met) - len(same), len(left)
    undecided = sum(_fits(_fitted(row)) and not _met(row) for row in lean)
    return (
        f"Of {len(rows)} programs {len(ran)} trained in the process that was watched. State takes less than\n"
        f"half of the peak in {len(lean)}; {len(met)} of these reach 60 %, {len(same)} with identical\n"
        f"results and {rounded} with `--allow rounding`. In {undecided} more the peak is reached and the\n"
        "verdict is UNDECIDED, since two runs of the script itself differ. State and inputs together\n"
        f"take less than half in {len(free)}, of which {both} reach it."
    )


def _fitted(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = row["verbs"].get("optimize", {})
    return found


def _share(row: dict[str, Any], kinds: Sequence[str]) -> float:
    fitted = _fitted(row)
    taken = sum((fitted.get("by_kind") or {}).get(kind, 0) for kind in kinds)
    return float(taken / fitted["peak_bytes"])


def _is_lean(row: dict[str, Any]) -> bool:
    return bool(_fitted(row).get("peak_bytes")) and _share(row, LASTING) < _HALF


def _met(row: dict[str, Any]) -> bool:
    verbs = (row["verbs"].get(name, {}) for name in ("optimize", "optimize, rounding"))
    return any(_fits(verb) and verb.get("verdict") != "UNDECIDED" for verb in verbs)


def _fits(verb: dict[str, Any]) -> bool:
    """Whether the plan fits, and is not said to compute something else."""
    return verb.get("code") == 0 and bool(verb.get("peak_bytes"))


def _missed_cells(row: dict[str, Any]) -> list[str]:
    rounding = row["verbs"].get("optimize, rounding", {})
    last = rounding if rounding.get("peak_bytes") else _fitted(row)
    notes = " ".join((*last.get("notes", ()), *_fitted(row).get("notes", ())))
    found = _SET_BY.search(notes)
    return [
        row["name"],
        _mib(last["peak_bytes"]),
        f"{_share(row, LASTING):.0%}".replace("%", " %"),
        f"{_share(row, ('input',)):.0%}".replace("%", " %"),
        _reached(last),
        found[1] if found else "-",
    ]


def _trained_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        ", ".join(row["techniques"]),
        str(row["backwards"]),
        str(row["equal"]),
    ]


def write_ranks_page(rows: list[dict[str, Any]]) -> None:
    """Write the page of programs in several processes."""
    RANKS_PAGE.write_text(_RANKS + _table(_RANK_COLUMNS, [_rank_cells(row) for row in rows]))


def write_unseen_page(rows: list[dict[str, Any]], trained: Sequence[dict[str, Any]] = ()) -> None:
    """Write the page of programs that were named before any of them was run, with the remarks on them."""
    ran = [row for row in rows if row["verbs"]]
    remarks = [f"* {row['name']}: {row['remark']}\n" for row in rows if row["remark"]]
    UNSEEN_PAGE.write_text(
        f"{_UNSEEN}{_machines(ran)}\n{_summary(ran)}\n\n"
        + _table(_RAN_COLUMNS, [_ran_cells(row) for row in ran])
        + f"\n## Remarks\n\n{''.join(remarks)}{_UNSEEN_TRAINED}"
        + _table(_TRAINED_COLUMNS, [_trained_cells(row) for row in trained])
    )


def _ran_cells(row: dict[str, Any]) -> list[str]:
    cells = dict(zip(_COLUMNS, _cells(row), strict=True))
    cells |= {"device": row["device"], "predicted": _error(_fitted(row))}
    return [cells[name] for name in _RAN_COLUMNS]


def _error(fitted: dict[str, Any]) -> str:
    """How far off the predicted peak is; the first plan's, where that was planned again."""
    first = next(filter(None, map(_FIRST.search, fitted.get("notes", ()))), None)
    if first:
        predicted, measured = float(first[1]), float(first[2])
    else:
        predicted, measured = (
            fitted.get(name) or 0 for name in ("predicted_bytes", "planned_bytes")
        )
    return f"{100 * (predicted / measured - 1):+.1f} %" if measured else "-"


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
        *(_percent(row, kinds) for kinds in (LASTING, ("input",))),
        _reached(fitted),
        _reached(verbs.get("optimize, rounding", {})),
        _verdict(fitted),
        ", ".join(fitted.get("techniques", ())) or "-",
        _seconds(row.get("alone", {})),
        _seconds(seen),
        _seconds(fitted),
        ", ".join(f"{code} {count}" for code, count in seen.get("findings", {}).items()) or "-",
    ]


def _percent(row: dict[str, Any], kinds: Sequence[str]) -> str:
    return f"{_share(row, kinds):.0%}".replace("%", " %") if _fitted(row).get("peak_bytes") else "-"


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
