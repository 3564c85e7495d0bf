"""The examples that benchmarks run."""

from __future__ import annotations

from pathlib import Path

from torchtrim import Script

NAMES = ("segmentation", "charlm", "resnet", "gan", "vit")
_FOLDER = Path(__file__).parent.parent / "examples"


def script(name: str) -> Script:
    """One example as it stands."""
    return Script(str(_FOLDER / f"{name}.py"), device="cpu")
