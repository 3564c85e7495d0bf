"""The page of the cures is what their docstrings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim.rewrite.base import Cure
from torchtrim.rewrite.pages import page
from torchtrim.rewrite.registry import all_cures

PAGE = Path(__file__).parents[2] / "docs" / "cures.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "python -m torchtrim.rewrite.pages docs/cures.md"


@pytest.mark.parametrize("cure", all_cures(), ids=lambda cure: cure.name)
def test_a_cure_says_what_it_does_and_has_a_test_of_its_own(cure: Cure) -> None:
    assert len(cure.summary) > 20
    assert (Path(__file__).parent / "cures" / f"test_{cure.name}.py").is_file()
