"""What reading a long step costs: a profile of 100,000 operators, loaded, analysed and planned.

python -m bench.analysis [OPERATORS]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine import save
from torchtrim.analysis.peak import holders
from torchtrim.analysis.timeline import kinds_over_time
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.files import load_profile, save_profile
from torchtrim.records.profile import Profile
from torchtrim.rules import diagnose

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from profiles import Step

_BLOCKS, _RUNS, _SIZE = 500, 5, 1000


def long_step(operators: int) -> Profile:
    """500 blocks of forward, each operator saved for one of backward, gradients zeroed at the end."""
    step = Step("emulated")
    weight = step.alive("gradient", _SIZE)
    made = []
    with step.module("net"):
        x: Any = step.alive("input", _SIZE)
        for number in range(_BLOCKS):
            with step.module(f"net.{number}", "Block"):
                for _ in range(operators // (2 * _BLOCKS)):
                    x = step.op("aten::index.Tensor", x, makes=_SIZE, line=1 + number)
                    made.append(x)
    for one in reversed(made):
        read = step.op(
            "aten::_local_scalar_dense",
            one,
            weight,
            phase="backward",
            forward=one.index,
            mutates=(weight,),
        )
        step.sync("item", read)
        step.free(one)
    step.op("aten::zero_", weight, mutates=(weight,), phase="other")
    return step.profile()


def plan(profile: Profile) -> None:
    """A plan for 70 % of the peak."""
    planner = Planner(profile, step_seconds=profile.step_seconds, fingerprint={})
    planner.plan(Budget(planner.simulated_original * 7 // 10))


def timed(function: Callable[[], Any]) -> dict[str, float]:
    """Median and range of a few runs, in seconds."""
    seconds = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return {
        "median": round(statistics.median(seconds), 3),
        "min": round(min(seconds), 3),
        "max": round(max(seconds), 3),
    }


def main() -> None:
    """Measure, print and save."""
    profile = long_step(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        found = {
            "operators": len(profile.operators),
            "save": timed(lambda: save_profile(profile, path)),
            "load": timed(lambda: load_profile(path)),
            "findings_and_holders": timed(
                lambda: (diagnose(profile), holders(profile), kinds_over_time(profile))
            ),
            "plan": timed(lambda: plan(profile)),
        }
    print(found)
    save("analysis", found)


if __name__ == "__main__":
    main()
