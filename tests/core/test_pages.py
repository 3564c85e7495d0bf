"""The glossary's page has every word, and is the one in docs."""

from __future__ import annotations

from pathlib import Path

from torchtrim.core.glossary import GLOSSARY
from torchtrim.core.pages import page

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"


def test_the_page_is_written_from_the_glossary() -> None:
    assert PAGE.read_text() == page(), "run: python -m torchtrim.core.pages docs/glossary.md"
    assert all(f"**{word}**: " in page() for word in GLOSSARY)
