"""Runs a script until so many backward passes have begun, and writes the bytes of each one's losses.

    python losses.py BACKWARDS FILE PLAN SCRIPT [ARGS...]

PLAN is the file of a plan, or `-` for the script as it is. Generators are seeded first, for scripts that do
not do so themselves.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """Run it; the process ends at the last backward, or when the script does."""
    count, file, plan, script = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    arguments = sys.argv[5:]
    _seed_where_the_script_begins()
    _note_losses(count, file)
    if plan == "-":
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
    else:
        sys.argv = ["torchtrim", "run", script, "--plan", plan, "--", *arguments]
        runpy.run_module("torchtrim", run_name="__main__", alter_sys=True)


def _seed_where_the_script_begins() -> None:
    """Seed after all that torchtrim imports, some of which draws numbers."""
    original = runpy.run_path

    def run_path(*args: Any, **kwargs: Any) -> dict[str, Any]:
        _seed()
        return original(*args, **kwargs)

    runpy.run_path = run_path


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


def _note_losses(count: int, file: Path) -> None:
    backward, seen, depth = torch.autograd.backward, 0, 0
    lines = file.open("w")

    def noted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen, depth
        if depth == 0:
            several = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
            lines.write(" ".join(_bits(tensor) for tensor in several) + "\n")
            lines.flush()
            seen += 1
            if seen >= count:
                os._exit(0)
        depth += 1
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            depth -= 1

    torch.autograd.backward = noted


def _bits(tensor: torch.Tensor) -> str:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()).hex()


main()
