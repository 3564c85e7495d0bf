"""Names the folder of a training's report, and writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtrim.api import Result


def saved(result: Result, out: str | Path | None) -> str:
    """Write the files of `torchtrim optimize`; return the page's path.

    `out`: a folder, by default `torchtrim-out` and the name of the running script.
    """
    from torchtrim.cli.output import write_files

    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0].endswith(".py") else ""
    folder = Path(out) if out is not None else Path("torchtrim-out") / (script or "training")
    page = write_files(result, folder).get("page", folder)
    return str(page)
