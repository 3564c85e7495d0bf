"""Plans that a verb reads: the file, what to do about a wrong one, and the certificate in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtrim.cli.output import NO_PLAN, OWN_FOLDER, PLAN, command_for, is_over
from torchtrim.core.words import did_you_mean, listed
from torchtrim.errors import TorchtrimError, UsageError
from torchtrim.records.commands import from_here, plan_again

if TYPE_CHECKING:
    from torchtrim.api import Result
    from torchtrim.records.plan import Plan

_MOST = 3  # Arbitrary; more plans do not fit a line.
_AGAIN = "plan again"


def check_plan(path: Path, options: dict[str, Any]) -> None:
    """Raise `UsageError` for a plan that does not exist, with the plans there are or the way to make one."""
    if path.exists():
        return
    folders = {path.parent, *(one for one in OWN_FOLDER.glob("*") if one.is_dir())}
    plans = sorted(str(from_here(one)) for folder in folders for one in folder.glob("*plan*.toml"))
    near = did_you_mean(str(path), plans, most=1)
    known = near or (f" There are {listed(plans, _MOST)}." if plans else "")
    make = command_for(options, "optimize", "--memory", "60%")
    raise UsageError(f"the plan {path} does not exist.{known} To make one: {make}")


def loaded_plan(path: Path, options: dict[str, Any]) -> Plan:
    """Return the plan in a file. Raises `UsageError` if there is none, `UnreadableInput` if it is damaged."""
    from torchtrim.records.files import load_plan

    check_plan(path, options)
    return load_plan(path)


def plan_in(options: dict[str, Any], folder: Path) -> Path:
    """Return the path of the plan to write, which may already exist with the user's pins.

    Raises `UsageError` if the one of `--plan` does not exist.
    """
    named: Path | None = options["pinned"]
    if named is not None:
        check_plan(named, options)
    return named or folder / PLAN


def pins_in(plan: Path) -> dict[str, tuple[str, ...]]:
    """Return the user's pins in a plan, else in one of its folder that missed; empty if there is neither."""
    from torchtrim.records.files import load_pins

    others = (plan.with_name(f"{kind}-{plan.name}") for kind in NO_PLAN)
    found = next((one for one in (plan, *others) if one.exists()), None)
    return load_pins(found) if found is not None else {}


@contextmanager
def advising(plan: Plan | None) -> Iterator[None]:
    """Add the command that plans again to an error that advises it."""
    try:
        yield
    except TorchtrimError as error:
        if plan is not None and _AGAIN in str(error).lower():
            again = plan_again(plan)
            if again not in str(error):
                error.add_note(f"To plan again: {again}")
        raise


def certify_file(path: Path, result: Result) -> tuple[str, ...]:
    """Write the verdict on a verified plan into its file; return a note on that, or on why it is not."""
    from torchtrim.records.files import save_proof

    report, plan = result.report, result.plan
    proof, known = report.certificate, plan.certified if plan is not None else None
    if proof is None or proof.verdict in ("NOT EQUAL", "UNDECIDED") or known is None:
        return ()
    if is_over(report):
        return (f"{path} gets no [certified]: its peak is over its budget",)
    if not save_proof(known, path):
        return (
            f"{path} gets no [certified]: its text cannot be edited. Remove that table from it.",
        )
    return (f"{path} now has the verdict under [certified]",)
