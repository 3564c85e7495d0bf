"""The page of the fixes is what their docstrings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim.rewriter.fix import Fix
from torchtrim.rewriter.pages import page
from torchtrim.rewriter.registry import all_fixes

PAGE = Path(__file__).parents[2] / "docs" / "fixes.md"
TESTS = Path(__file__).parents[1] / "fixes"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "python -m torchtrim.rewriter.pages docs/fixes.md"


@pytest.mark.parametrize("fix", all_fixes(), ids=lambda fix: fix.name)
def test_a_fix_says_what_it_does_and_has_a_test_of_its_own(fix: Fix) -> None:
    assert len(fix.summary) > 20
    assert (TESTS / f"test_{fix.name}.py").is_file()
