"""Draws docs/pictures/page-*.png, the top of the report's page: `python docs/pages.py`, with a Chromium."""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace

from torchtrim.records import Report
from torchtrim.records.plan import Prediction
from torchtrim.report.html import render

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from report import samples, test_ranks  # noqa: E402
from report.browser import Tab, opened  # noqa: E402

HEIGHT = 1000  # The answer, the plan, and where memory goes.
NOTHING = replace(
    samples.OPTIMIZE,
    planned=None,
    certificate=None,
    budget_bytes=500 * samples.MIB,
    plan=replace(
        samples.PLAN,
        techniques=(),
        predicted=Prediction(peak_bytes=412 * samples.MIB, step_seconds=0.612),
    ),
)
PICTURES = (
    ("fits", samples.OPTIMIZE, 1300, False),
    ("missed", samples.MISSED, 1300, False),
    ("nothing", NOTHING, 1300, False),
    ("ranks", test_ranks.REPORT, 1300, False),
    ("fixes", samples.FIXED, 1300, False),
    ("fits-dark", samples.OPTIMIZE, 1300, True),
    ("fits-phone", samples.OPTIMIZE, 390, False),
)


def draw(tab: Tab, name: str, report: Report, width: int, *, dark: bool) -> None:
    """Draw the top of one page."""
    before = samples.profile(412) if report.original else None
    after = samples.profile(236) if report.planned else None
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(render(report, before, after), encoding="utf-8")
        tab.look(page, width=width, dark=dark)
        clip = {"x": 0, "y": 0, "width": width, "height": HEIGHT, "scale": 0.65}
        shot = tab.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    (HERE / "pictures" / f"page-{name}.png").write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    with opened() as tab:
        for name, report, width, dark in PICTURES:
            draw(tab, name, report, width, dark=dark)
