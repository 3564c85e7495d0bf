"""Draws docs/pictures/page-*.png from real runs: `python docs/pages.py [KIND...]`, with a Chromium.

Each picture has the top of one page four times: at 1300 and 390 pixels, light and dark.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from report.browser import Tab, opened  # noqa: E402

VIT = "vit.py -- --batch-size 8"
RUNS = {
    "fits": f"--memory 60% --device emulated {VIT}",
    "missed": f"--memory 15% --device emulated {VIT}",
    "nothing": f"--memory 1GiB --device emulated {VIT}",
    "fixes": "--device emulated segmentation.py -- --batch-size 1",
    "ranks": "--memory 80% --processes 2 ranks.py -- --blocks 6 --width 256",
}
HEIGHT, SCALE, GAP = 1280, 0.5, 8  # The answers, the figures and the first chart, still readable.


def page_of(kind: str, folder: Path) -> Path:
    """Run torchtrim on a copy of an example, and return the page that it wrote."""
    shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "tests" / "scripts" / "ranks.py", folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["torchtrim", "optimize", "-q", *RUNS[kind].split()]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, check=False)
    assert done.returncode == (kind == "missed"), kind
    return next(folder.rglob("*report.html"))


def shot(tab: Tab, page: Path, width: int, *, dark: bool) -> str:
    """Return the top of a page as a picture."""
    tab.look(page, width=width, dark=dark)
    clip = {"x": 0, "y": 0, "width": width, "height": HEIGHT, "scale": SCALE}
    picture = tab.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    return str(picture["data"])


def draw(tab: Tab, kind: str, folder: Path) -> None:
    """Draw the four looks of one page."""
    page, sheet = page_of(kind, folder), folder / "sheet.html"
    looks = [shot(tab, page, width, dark=dark) for dark in (False, True) for width in (1300, 390)]
    images = "".join(f"<img src='data:image/png;base64,{one}'>" for one in looks)
    columns = f"display:grid;grid-template-columns:auto auto;gap:{GAP}px;width:max-content"
    sheet.write_text(f"<body style='margin:0;background:#888;{columns}'>{images}", encoding="utf-8")
    width, height = int(SCALE * 1690) + GAP, int(2 * SCALE * HEIGHT) + GAP
    tab.look(sheet, width=width, dark=False)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    whole = tab.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    target = ROOT / "docs" / "pictures" / f"page-{kind}.png"
    target.write_bytes(base64.b64decode(whole["data"]))


if __name__ == "__main__":
    with opened() as tab:
        for kind in sys.argv[1:] or RUNS:
            with tempfile.TemporaryDirectory() as folder:
                draw(tab, kind, Path(folder))
