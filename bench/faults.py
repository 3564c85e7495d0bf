"""Which faults a certificate catches, and whether it names the place; beside it, what else would catch them.

python -m bench.faults [--only PATTERN] [--program PATTERN] [--json]

Each fault of `cases/faulty/faults.toml` is a small change of a program there, made after a real bug, whose
report it links to. Both programs run three steps, four where memory and checkpoints are looked at. A place is
named rightly if it is a line that the change touches, or the line after it, on either side, or what `names`
says: the module, buffer or setting.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.machine import RESULTS, save, slug
from torchtrim.certify.certify import certify, failed
from torchtrim.certify.contest import Contest
from torchtrim.errors import ScriptFailed
from torchtrim.records.certificate import Certificate
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.script import Script
from torchtrim.runner.trials import run_trial

PROGRAMS = Path(__file__).parents[1] / "tests" / "cases" / "faulty"
STEPS = Request(warmup=1, steps=1, measured=False)
MORE_STEPS = Request(warmup=1, steps=2, round_trip=True)
EYE = 1e-4


class Fault(NamedTuple):
    """A change of a program, and the report of a bug like it. `more`: what is left behind and what is saved
    is looked at."""

    name: str
    program: str
    source: str
    old: str
    new: str
    names: str = ""
    more: bool = False

    @property
    def texts(self) -> tuple[str, str]:
        """The program as it is, and with the fault."""
        text = (PROGRAMS / f"{self.program}.py").read_text()
        assert text.count(self.old) == 1, self.name
        wrong = text.replace(self.old, self.new)
        return text, wrong.replace(
            "import torch\n", "import torch\nimport torch.utils.checkpoint\n", 1
        )


class Caught(NamedTuple):
    """What became of one. `by`: who else would have said that something is wrong."""

    fault: Fault
    certificate: Certificate
    by: tuple[str, ...]

    @property
    def named(self) -> bool:
        """Whether the certificate names the place."""
        return is_named(self.fault, self.certificate)


def faults(pattern: str = "*") -> Iterator[Fault]:
    """Those whose name fits."""
    for one in tomllib.loads((PROGRAMS / "faults.toml").read_text())["fault"]:
        if fnmatch.fnmatch(one["name"], pattern):
            yield Fault(**one)


def try_fault(fault: Fault) -> Caught:
    """Run both, certify, and ask the others."""
    with ExitStack() as stack:
        home, one, two = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchtrim-")))
            for _ in range(3)
        )
        scripts, steps = [], MORE_STEPS if fault.more else STEPS
        for name, text in zip(("right", "wrong"), fault.texts, strict=True):
            path = home / f"{name}.py"
            path.write_text(text)
            scripts.append(Script(str(path), device="cpu", timeout=60.0))
        original = run_trial(scripts[0], steps, one)
        try:
            other = run_trial(scripts[1], steps, two)
        except ScriptFailed as error:
            said = "checkpoint" if "CheckpointError" in str(error) else "an exception"
            return Caught(fault, failed(original, error), (said,))
        contest = Contest(scripts[0], scripts[1], steps, steps)
        certificate = certify(contest, original, other, lambda _: None)
    return Caught(fault, certificate, tuple(_others(original, other)))


def _others(original: Trial, other: Trial) -> Iterator[str]:
    """Who else would see it, of those that look at the loss."""
    one, two = (
        torch.tensor([loss for step in trial.steps for loss in step.losses])
        for trial in (original, other)
    )
    if one.shape != two.shape:
        yield from ("assert_close", "eye")
        return
    try:
        torch.testing.assert_close(one, two)
    except AssertionError:
        yield "assert_close"
    if bool(((one - two).abs() > EYE * one.abs()).any()):
        yield "eye"


def is_named(fault: Fault, certificate: Certificate) -> bool:
    """Whether the first difference is where the change is."""
    first = certificate.first_difference
    if first is None:
        return False
    if fault.names and re.search(fault.names, f"{first.op} of {first.module} {first.inside}"):
        return True
    right, wrong = changed(fault)
    return first.line in right or first.other_line in wrong


def changed(fault: Fault) -> tuple[set[int], set[int]]:
    """The lines that the change touches, and the one after, on both sides; a removed line is the next."""
    one, two = (text.splitlines() for text in fault.texts)
    sides: tuple[set[int], set[int]] = (set(), set())
    imported = two.index("import torch.utils.checkpoint") + 1
    for kind, a, b, c, d in SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        if kind != "equal" and (c, d) != (imported - 1, imported):
            sides[0].update(range(a + 1, max(b, a + 1) + 2))
            sides[1].update(range(c + 1, max(d, c + 1) + 2))
    return sides


def table(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures."""
    by = [name for one in rows.values() for name in one["also"]]
    checkpointed = [one for one in faults() if "checkpoint(" in one.new]
    return {
        "faults": len(rows),
        "certificate": sum(one["verdict"] == "NOT EQUAL" for one in rows.values()),
        "named": sum(one["named"] for one in rows.values()),
        "assert_close on the loss": by.count("assert_close"),
        "loss curve at 1e-4": by.count("eye"),
        "an exception": by.count("an exception"),
        "checkpoint's determinism check": by.count("checkpoint"),
        "of faults in a checkpoint": len(checkpointed),
    }


def row_of(one: Caught) -> dict[str, Any]:
    """What is kept of one."""
    return {
        "name": one.fault.name,
        "source": one.fault.source,
        "verdict": one.certificate.verdict,
        "named": one.named,
        "also": one.by,
    }


def main() -> None:
    """Try them, and put them beside those that were tried before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="names to try")
    parser.add_argument("--program", default="*", help="programs of which faults are tried")
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    path = RESULTS / slug() / "faults.json"
    before = json.loads(path.read_text())["faults"] if options.json and path.exists() else []
    rows = ordered = {one["name"]: one for one in before}
    for fault in faults(options.only):
        if not fnmatch.fnmatch(fault.program, options.program):
            continue
        one = try_fault(fault)
        rows[fault.name] = row_of(one)
        print(f"{one.certificate.verdict:10} {one.named} {fault.name}: {one.by}", flush=True)
        if not one.named or one.certificate.verdict != "NOT EQUAL":
            first = one.certificate.first_difference
            print(f"    {one.certificate.reason} {first} {changed(fault)}", flush=True)
        ordered = {one.name: rows[one.name] for one in faults() if one.name in rows}
        if options.json:
            save("faults", {"figures": table(ordered), "faults": [*ordered.values()]})
    print("\n".join(f"{name:32} {count}" for name, count in table(ordered).items()))


if __name__ == "__main__":
    main()
