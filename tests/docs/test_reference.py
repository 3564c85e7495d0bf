import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_is_current() -> None:
    page = runpy.run_path(str(DOCS / "reference.py"))["page"]()
    written = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert written == page, "run `python docs/reference.py`"
