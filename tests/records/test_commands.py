"""Commands as a person copies them into a shell."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtrim.records.commands import path_argument, quoted, shell_words


@pytest.mark.parametrize(
    ("path", "word"),
    [("a.py", "a.py"), ("-a.py", "./-a.py"), ("--", "./--"), ("a b.py", "'a b.py'"), ("/a", "/a")],
)
def test_a_path_is_one_word_and_no_option(path: str, word: str) -> None:
    assert quoted(path) == word


@given(st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1), min_size=1))
def test_a_command_is_parted_between_its_words_alone(paths: list[str]) -> None:
    command = " ".join(map(quoted, paths))
    words = shell_words(command)
    assert " ".join(words) == command
    assert [word for one in words for word in shlex.split(one)] == list(map(path_argument, paths))
