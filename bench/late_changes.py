"""What becomes of a planned run when the script does something new after the steps that were certified.

python -m bench.late_changes [--only PATTERN] [--technique NAME] [--json]

Each entry of `bench/late/attacks.toml` changes `bench/late/loop.py` from its fifth step on: a buffer that a
block begins to write, a hook, another batch size, a skipped step. The plan is made on the loop as it is,
one technique at a time, and the changed loop runs with it and without it, all in float64. What it prints
(losses, sums of weights and buffers, counters, random numbers drawn last) must be the same, to the bit where
the technique says so and else within 1e-9, or the run must stop and name torchtrim. Anything else is silent.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from bench.machine import save
from torchtrim.errors import TorchtrimError
from torchtrim.records.files import load_plan
from torchtrim.records.plan import Plan
from torchtrim.runner.planned_script import run_planned
from torchtrim.runner.script import Script

HERE = Path(__file__).parent / "late"
TECHNIQUES = (
    "recompute",
    "replay",
    "optimizer_in_backward",
    "overwrite",
    "micro_batch",
    "chunked_loss",
    "offload_activations",
)
PLACES = {
    "micro_batch": ["Net.blocks.?"],
    "offload_activations": ["Net:relu.? until*"],
}
ROUNDS = 1e-9
SECONDS = 60


class Ran(NamedTuple):
    """How a run ended: what it printed last, its exit code, what stood on stderr."""

    printed: str
    code: int
    said: str


def attacks() -> Iterator[tuple[str, str, str]]:
    """Group, name and script of each."""
    base = (HERE / "loop.py").read_text()
    for group, entries in tomllib.loads((HERE / "attacks.toml").read_text()).items():
        for name, slots in entries.items():
            yield group, name, filled(base, slots)


def filled(base: str, slots: dict[str, str]) -> str:
    """The loop with code in its slots."""

    def put(match: re.Match[str]) -> str:
        return textwrap.indent(slots.pop(match["name"], "pass"), match["indent"])

    text = re.sub(r"^(?P<indent> *)#: (?P<name>\w+)$", put, base, flags=re.MULTILINE)
    assert not slots, slots
    return text


def plan_of(technique: str, folder: Path) -> Plan:
    """A plan of one technique for the loop as it is, wherever it has a place."""
    script, path = folder / "loop.py", folder / f"{technique}.toml"
    script.write_text(filled((HERE / "loop.py").read_text(), {}))
    path.write_text(f"[pins]\n{technique} = {json.dumps(PLACES.get(technique, ['*']))}\n")
    device = "emulated" if technique == "offload_activations" else "cpu"
    command = "torchtrim.cli.main", "optimize", str(script), "--memory", "99%", "--plan", str(path)
    options = ("--device", device, "--allow", "rounding", "--steps", "1")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from torchtrim.cli.main import main; main()",
            *command[1:],
            *options,
        ],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    plan = load_plan(path) if "schema_version" in path.read_text() else None
    assert plan is not None, done.stdout + done.stderr
    only = tuple(one for one in plan.techniques if one.name == technique)
    assert only, (technique, done.stdout, done.stderr)
    return replace(plan, script_sha256="", techniques=only)


def ran(script: Path, plan: Plan | None) -> Ran:
    """Run a script in a fork of this process, which has torch loaded."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "out", Path(folder) / "err"]
        if (child := os.fork()) == 0:
            _become(script, plan, *files)
        _, status = os.waitpid(child, 0)
        out, err = (file.read_text(errors="replace") for file in files)
    lines = out.strip().splitlines()
    return Ran(lines[-1] if lines else "", os.waitstatus_to_exitcode(status), err)


def _become(script: Path, plan: Plan | None, out: Path, err: Path) -> None:
    code = 1
    try:
        for number, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2)
        )
        import signal

        signal.alarm(SECONDS)
        run_planned(Script(str(script)), plan)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0) if not isinstance(end.code, str) else 1
    except TorchtrimError as error:
        print(f"error: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        os._exit(code)


def judged(plain: Ran, planned: Ran, equivalence: str) -> str:
    """`equal`, `stopped`, `fails too`, or what is silently different."""
    if plain.code:
        return (
            "fails too" if planned.code else "SILENT: the original fails, the planned run does not"
        )
    if planned.code:
        named = "torchtrim" in planned.said or "plan" in planned.said
        return "stopped" if named else f"SILENT: died with {planned.code}: {planned.said[-200:]}"
    if plain.printed == planned.printed:
        return "equal"
    if equivalence == "BITWISE":
        return f"SILENT: {_first_difference(plain.printed, planned.printed)}"
    one, other = (list(_leaves(json.loads(ran.printed))) for ran in (plain, planned))
    return (
        "equal"
        if _near(one, other)
        else f"SILENT: {_first_difference(plain.printed, planned.printed)}"
    )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _near(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a == b or (isinstance(a, float) and math.isclose(a, b, rel_tol=ROUNDS, abs_tol=ROUNDS))
        for a, b in zip(one, other, strict=True)
    )


def _first_difference(one: str, other: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return f"{one[max(0, at - 20) : at + 25]} | {other[max(0, at - 20) : at + 25]}"


def main() -> None:
    """Run the attacks and print what becomes of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="*")
    parser.add_argument("--technique", choices=TECHNIQUES)
    parser.add_argument("--json", action="store_true", help="keep the figures under bench/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [options.technique] if options.technique else TECHNIQUES
    found: dict[str, dict[str, str]] = collections.defaultdict(dict)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans = {one: plan_of(one, folder) for one in chosen}
        for group, attack, text in attacks():
            if not fnmatch.fnmatch(attack, options.only):
                continue
            script = folder / f"{attack}.py"
            script.write_text(text)
            plain = ran(script, None)
            for technique, plan in plans.items():
                verdict = judged(plain, ran(script, plan), plan.techniques[0].equivalence)
                found[technique][f"{group}.{attack}"] = verdict
                if verdict.startswith("SILENT") or options.only != "*":
                    print(f"{technique:22} {group}.{attack}: {verdict}", flush=True)
            if plain.code and options.only != "*":
                print(plain.said[-300:])
    for technique, verdicts in found.items():
        counts = collections.Counter(verdict.partition(":")[0] for verdict in verdicts.values())
        print(f"{technique:22} {len(verdicts)} attacks: {dict(counts)}")
    if options.json:
        save(
            "late_changes", {one: dict(sorted(verdicts.items())) for one, verdicts in found.items()}
        )


if __name__ == "__main__":
    main()
