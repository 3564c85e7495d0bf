"""Runs a script as `python` would until its optimizer has stepped so often, and writes how long that took.

    python alone.py STEPS FILE SCRIPT [ARGS...]

What a verb takes is compared with this: the script's own time for as many steps as the verb needs.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run it; the process ends at the last step, or when the script does."""
    begin = time.perf_counter()
    steps, file, script = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(script).resolve().parent)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts: dict[int, int] = {}

    def stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if counts[id(optimizer)] >= steps:
            file.write_text(f"{time.perf_counter() - begin:.2f} {steps}")
            os._exit(0)

    register_optimizer_step_post_hook(stepped)
    runpy.run_path(script, run_name="__main__")
    file.write_text(f"{time.perf_counter() - begin:.2f} {max(counts.values(), default=0)}")


main()
