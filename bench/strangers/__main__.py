"""Runs `diagnose` and `optimize` on public programs, as they are, and writes what came of it.

    python -m bench.strangers --sources DIR [--library DIR] [NAME...] [--limit SECONDS] [--save] [--keep DIR]
                              [--programs unseen]

The programs are not in this repository: `DIR/NAME` is the working tree of `OWNER/NAME` at the commit that
`programs.toml` gives. What they import is found in `--library`. Their data is generated (`data.py`), so
nothing is downloaded. Each is copied for each run, made small by its command line alone, and runs on CPU.
`--programs unseen` runs those of `unseen.toml` instead, which were named before any of them was run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import machine
from bench.strangers.running import (
    HERE,
    Ended,
    Place,
    Program,
    paths_of,
    prepared,
    programs,
    run,
)
from bench.strangers.table import (
    LASTING,
    rows_of,
    write_page,
    write_ranks_page,
    write_unseen_page,
)

ALONE_STEPS = 5
BUDGET, RANKS_BUDGET = "60%", "70%"
ROUNDING = "optimize, rounding"
"""It runs where BITWISE levers alone miss the budget, and what lasts takes less than half of the peak."""
_PLACES = re.compile(r"/[^\s\"():]*/(?=(?:copies|out)/)")
"""Folders of the machine that it ran on."""
VERBS = {
    "diagnose": ("diagnose",),
    "optimize": ("optimize", "--memory", BUDGET),
    ROUNDING: ("optimize", "--memory", BUDGET, "--allow", "rounding"),
}


def tried(program: Program, place: Place, verbs: list[str], limit: float) -> dict[str, Any]:
    """The script alone, then each verb, each on a copy of its own."""
    found: dict[str, Any] = {
        **{key: getattr(program, key) for key in ("name", "kind", "repository", "commit", "args")},
        "script": program.script,
        "processes": program.processes,
        "device": program.device,
        "changed": program.changed,
        **_known(program, place),
    }
    if "diagnose" in verbs and program.processes == 1 and program.device == "cpu":
        found["alone"] = _alone(program, place, limit)
    for verb in verbs:
        if verb == ROUNDING and not _wants_more(found["verbs"].get("optimize", {})):
            found["verbs"].pop(verb, None)
            continue
        found["verbs"][verb] = _verb(program, place, verb, limit)
        print(f"{program.name}: {verb}: {_short(found['verbs'][verb])}", flush=True)
    return found


def _wants_more(optimized: dict[str, Any]) -> bool:
    """Whether a budget is missed of which what lives through the step takes less than half of the peak."""
    lasting = sum((optimized.get("by_kind") or {}).get(kind, 0) for kind in LASTING)
    return optimized.get("code") == 1 and lasting < 0.5 * (optimized.get("peak_bytes") or 0)


def _known(program: Program, place: Place) -> dict[str, Any]:
    """What was found before, in the folder that is kept."""
    file = place.scratch / "results" / f"{program.name}.json"
    known = json.loads(file.read_text()) if file.exists() else {"verbs": {}}
    return {key: known[key] for key in ("alone", "verbs") if key in known}


def _alone(program: Program, place: Place, limit: float) -> dict[str, Any]:
    folder = prepared(program, place, "alone")
    file = folder / "alone.txt"
    command = [sys.executable, str(HERE / "alone.py"), str(ALONE_STEPS), str(file)]
    ended = run(
        [*command, program.script, *shlex.split(program.args)],
        folder,
        paths_of(program, place, "alone"),
        limit,
    )
    steps = int(file.read_text().split()[1]) if file.exists() else None
    print(f"{program.name}: alone: {ended.seconds:.1f} s, {steps} steps", flush=True)
    if steps is None:
        print(ended.output[-1500:], flush=True)
    return {"seconds": round(ended.seconds, 1), "steps": steps, "code": ended.code}


def _verb(program: Program, place: Place, verb: str, limit: float) -> dict[str, Any]:
    folder = prepared(program, place, "tried")
    out = place.scratch / "out" / f"{program.name}-{verb}".replace(" ", "-").replace(",", "")
    shutil.rmtree(out, ignore_errors=True)
    first, *rest = VERBS[verb]
    command = [sys.executable, "-m", "torchtrim", first, program.script, *rest]
    command += ["--device", program.device, "--timeout", str(limit), "--out", str(out)]
    if program.processes > 1:
        command = [RANKS_BUDGET if word == BUDGET else word for word in command]
        command += ["--processes", str(program.processes), "--steps", "1"]
    ended = run(
        [*command, "--", *shlex.split(program.args)],
        folder,
        paths_of(program, place, "tried"),
        limit,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "output.txt").write_text(ended.output)
    report = out / "report.json"
    facts = rows_of(json.loads(report.read_text())) if report.exists() else {}
    return {"code": ended.code, "seconds": round(ended.seconds, 1), **facts, **_said(ended, facts)}


def _said(ended: Ended, facts: dict[str, Any]) -> dict[str, Any]:
    """What was said instead of a report."""
    if facts:
        return {}
    lines = [line for line in ended.output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")]
    return {"said": (errors or lines or ["nothing"])[-1][:300]}


def _short(found: dict[str, Any]) -> str:
    return json.dumps({key: value for key, value in found.items() if key != "levers"})


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them by default")
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--library", default="")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each run")
    parser.add_argument("--verbs", nargs="*", choices=list(VERBS), default=list(VERBS))
    parser.add_argument("--save", action="store_true", help="into the results and the docs")
    parser.add_argument("--keep", type=Path, help="where copies, reports and results are left")
    parser.add_argument("--programs", choices=("known", "unseen"), default="known")
    options = parser.parse_args()
    everything = programs("unseen.toml") if options.programs == "unseen" else programs()
    named = [one for one in everything if one.name in options.names]
    chosen = named or [one for one in everything if not (options.names or one.reserve)]
    if not chosen:
        parser.error(f"there are {', '.join(one.name for one in everything)}")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.keep or Path(temporary)
        place = Place(options.sources, options.library, scratch)
        for program in chosen:
            source = options.sources / program.repository.partition("/")[2]
            if not (program.driver or source.exists()):
                print(f"{program.name}: not among the sources")
                continue
            result = tried(program, place, options.verbs, options.limit)
            _keep(place, result)
        if options.save and options.programs == "unseen":
            _save_unseen(scratch)
        elif options.save:
            _save(scratch)


def _keep(place: Place, result: dict[str, Any]) -> None:
    folder = place.scratch / "results"
    folder.mkdir(parents=True, exist_ok=True)
    result["load"] = round(os.getloadavg()[0], 1)
    text = json.dumps(result)
    for mine in filter(None, (str(place.scratch.resolve()), *place.library.split(os.pathsep))):
        text = text.replace(f"{mine}/", "")
    (folder / f"{result['name']}.json").write_text(text)


def _save(scratch: Path) -> None:
    """Write what ran here, beside what ran here before, and the pages with what ran on other machines too."""
    found = {**{row["name"]: row for row in _saved_here()}, **_ran(scratch)}
    for name, several in (("strangers", False), ("strangers-ranks", True)):
        rows = _in_order(found)
        own = [row for row in rows if (row.get("processes", 1) > 1) == several]
        if own:
            machine.save(name, {"programs": own})
            _write(name, own)


def _ran(scratch: Path) -> dict[str, dict[str, Any]]:
    """What is in the folder that is kept, by name."""
    texts = [_PLACES.sub("", file.read_text()) for file in (scratch / "results").glob("*.json")]
    rows = [{**json.loads(text), "machine": machine.facts()["processor"]} for text in texts]
    return {row["name"]: row for row in rows}


def _save_unseen(scratch: Path) -> None:
    """Write what ran here; the page has what ran elsewhere too, and remarks on what could not run."""
    own = {row["name"]: row for row in machine.saved("unseen").get("programs", ())}
    own.update(_ran(scratch))
    machine.save("unseen", {"programs": list(own.values())})
    found = {row["name"]: row for row in _elsewhere("unseen")} | own
    rows = []
    for program in programs("unseen.toml"):
        row = found.get(program.name)
        if row or program.remark:
            empty = {"name": program.name, "kind": program.kind, "verbs": {}}
            rows.append({**empty, **(row or {}), "remark": program.remark})
    trained = machine.saved("trained-unseen").get("programs", ())
    write_unseen_page(rows, [*_elsewhere("trained-unseen"), *trained])


def _elsewhere(name: str) -> list[dict[str, Any]]:
    return [row for one in machine.saved_elsewhere(name) for row in one.get("programs", ())]


def _saved_here() -> list[dict[str, Any]]:
    saved = [machine.saved(name) for name in ("strangers", "strangers-ranks")]
    return [row for one in saved for row in one.get("programs", ())]


def _in_order(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [found[one.name] for one in programs() if one.name in found]


def _write(name: str, own: list[dict[str, Any]]) -> None:
    found = {
        row["name"]: {**row, "machine": saved["machine"]["processor"]}
        for saved in machine.saved_elsewhere(name)
        for row in saved["programs"]
    }
    rows = _in_order({**found, **{row["name"]: row for row in own}})
    if name == "strangers":
        own_trained = machine.saved("trained").get("programs", ())
        write_page(rows, [*own_trained, *_elsewhere("trained")])
    else:
        write_ranks_page(rows)


if __name__ == "__main__":
    main()
