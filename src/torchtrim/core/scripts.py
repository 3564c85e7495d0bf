"""A script's file, checked before torch is imported."""

from __future__ import annotations

from pathlib import Path

from torchtrim.core.words import did_you_mean
from torchtrim.errors import UsageError


def check_script_file(target: str) -> None:
    """Raise `UsageError` if there is no such file; its message suggests a Python file of the folder."""
    path = Path(target)
    if path.is_file():
        return
    others = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = did_you_mean(path.name, others, most=1, shown=lambda one: str(path.with_name(one)))
    raise UsageError(
        f"the script {target} does not exist.{near} Give the path of a Python file, or -m and "
        "the name of a module."
    )
