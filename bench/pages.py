"""What a page of a large profile costs: seconds, memory and bytes, at 10,000 and 1,000,000 operators.

    python -m bench.pages [OPERATORS ...] [--save]

Each page is made by a process of its own, which loads the saved profile, finds what is wasteful and renders.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = (10_000, 1_000_000)


def make(operators: int, path: Path) -> None:
    """Save a profile of that many operators."""
    from bench.analysis import long_step
    from torchtrim.records.files import save_profile

    save_profile(long_step(operators), path)


def page(path: Path) -> dict[str, Any]:
    """Make the page of a saved profile, in this process."""
    from torchtrim.analysis.peak import holders
    from torchtrim.analysis.prices import priced
    from torchtrim.records import Report
    from torchtrim.records.files import load_profile
    from torchtrim.report import html
    from torchtrim.rules.registry import diagnose

    begin = time.perf_counter()
    profile = load_profile(path)
    loaded = time.perf_counter() - begin
    findings, waiting = priced(profile, diagnose(profile))
    report = Report(
        torchtrim="",
        torch=profile.torch,
        verb="diagnose",
        device=profile.device,
        script=profile.script,
        steps=1,
        findings=findings,
        waiting=waiting,
        holders=holders(profile),
    )
    text = html.render(report, profile, None)
    return {
        "operators": len(profile.operators),
        "load_seconds": round(loaded, 2),
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(time.process_time(), 2),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "page_bytes": len(text.encode()),
        "says_what_was_dropped": ("more" in text and "dropped" in text) or "left out" in text,
    }


def alone(what: str, *words: str) -> str:
    """What `python -m bench.pages --what ...` prints, run in a fresh process."""
    command = [sys.executable, "-m", "bench.pages", what, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", type=int, default=SIZES)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--page", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(int(options.make[0]), Path(options.make[1]))
        return
    if options.page:
        print(json.dumps(page(options.page)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for operators in options.operators:
            path = Path(folder) / "profile.json"
            alone("--make", str(operators), str(path))
            rows.append(json.loads(alone("--page", str(path))))
            print(rows[-1])
    if options.save:
        from bench.machine import save

        print(save("pages", {"rows": rows}))


if __name__ == "__main__":
    main()
