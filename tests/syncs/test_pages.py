"""The page of the documentation that shows the table of waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim.syncs.lookup import ROWS
from torchtrim.syncs.pages import VERSIONS, main, page

DOCUMENT = Path(__file__).parents[2] / "docs" / "waits.md"


def test_the_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == page()


def test_it_shows_each_row_with_its_sources() -> None:
    text = page()
    for row in ROWS:
        assert f"### {row.name} ({row.code})" in text
        assert all(found.url in text for found in row.evidence)


def test_it_has_a_column_for_each_version() -> None:
    assert f"| row | code | {' | '.join(VERSIONS)} |" in page()


def test_it_is_written_where_it_is_told(tmp_path: Path) -> None:
    main([str(tmp_path / "waits.md")])
    assert (tmp_path / "waits.md").read_text(encoding="utf-8") == page()


def test_it_wants_one_file() -> None:
    with pytest.raises(SystemExit, match="one file"):
        main([])
