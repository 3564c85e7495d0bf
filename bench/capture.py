"""Whether `diagnose --capture` names the lines of public programs that a CUDA graph cannot hold, no other.

    python -m bench.capture --sources DIR [--library DIR] [NAME...] [--limit SECONDS] [--json]

The programs are those of `bench.strangers`, which are not in this repository. Each runs as it is on an
emulated device, made small by its command line alone. Its lines are labelled in
`bench/strangers/capturable.toml`, each
with the rule that it breaks.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from bench.machine import save
from bench.strangers.running import HERE, Place, Program, prepared, programs, run

_INSIDE = re.compile(r"([\w.]+\.py:\d+) in ")
LABELS = HERE / "capturable.toml"


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line in the way, and the rule that says so."""

    file: str
    line: int
    rule: str


class Labelled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program, how it is run on a device, and its lines in the way of a capture."""

    name: str
    args: str
    lines: tuple[Line, ...]


def labels() -> list[Labelled]:
    """All of `capturable.toml`; each rule is one that it cites."""
    found = tomllib.loads(LABELS.read_text())
    rows = msgspec.convert(found["program"], list[Labelled])
    assert {line.rule for row in rows for line in row.lines} <= set(found["rules"])
    return rows


def tried(labelled: Labelled, program: Program, place: Place, limit: float) -> dict[str, Any]:
    """What `diagnose --capture` names of a program, beside its labels."""
    folder = prepared(program, place, "capture")
    own = [str(place.copy_of(program, "capture") / program.path)] if program.path else []
    paths = [*own, str(HERE.parents[1] / "src"), *filter(None, [place.library])]
    command = [sys.executable, "-m", "torchtrim", "diagnose", program.script, "--capture"]
    command += ["--device", "emulated", "--steps", "1", "--out", "captured"]
    ended = run([*command, "--", *shlex.split(labelled.args)], folder, paths, limit)
    report = folder / "captured" / "report.json"
    if not report.exists():
        return {"name": labelled.name, "said": ended.output[-600:], "right": False}
    findings = json.loads(report.read_text())["findings"]
    named = {place for one in findings if one["code"] == "TT402" for place in _places(one)}
    wanted = {f"{one.file}:{one.line}" for one in labelled.lines}
    return {
        "name": labelled.name,
        "lines": len(wanted),
        "missed": sorted(wanted - named),
        "false": sorted(named - wanted),
        "capturable": not wanted,
        "right": named == wanted,
        "seconds": round(ended.seconds, 1),
    }


def _places(finding: dict[str, Any]) -> list[str]:
    """The lines of libraries that the finding names, else its own."""
    own = f"{Path(finding['path']).name}:{finding['line']}"
    return _INSIDE.findall(finding["message"]) or [own]


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them by default")
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--library", default="")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each program")
    parser.add_argument(
        "--json", action="store_true", help="write bench/results/MACHINE/capture.json"
    )
    options = parser.parse_args()
    known = {one.name: one for one in programs()}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Place(options.sources, options.library, Path(temporary))
        for labelled in labels():
            if not options.names or labelled.name in options.names:
                rows.append(tried(labelled, known[labelled.name], place, options.limit))
                print(json.dumps(rows[-1]), flush=True)
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} right")
    if options.json:
        print(save("capture", {"programs": len(rows), "right": right, "of": rows}))


if __name__ == "__main__":
    main()
