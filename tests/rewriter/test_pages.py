"""The page of the fixes matches their documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchtrim.rewriter.fix import Fix, all_fixes
from torchtrim.rewriter.pages import page

PAGE = Path(__file__).parents[2] / "docs" / "fixes.md"
TESTS = Path(__file__).parents[1] / "fixes"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "python -m torchtrim.rewriter.pages docs/fixes.md"


@pytest.mark.parametrize("fix", all_fixes(), ids=lambda fix: fix.name)
def test_a_fix_is_documented_and_tested(fix: Fix) -> None:
    home = fix.write.__module__.rpartition(".")[2]
    tests = (TESTS / f"test_{home}.py").read_text(encoding="utf-8")
    assert len(fix.summary) > 20
    assert re.search(rf"import FIX$|\b{fix.name.upper()}(, |\.find\()", tests, re.MULTILINE)
