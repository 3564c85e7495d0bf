"""Lists of names in sentences, first lines, and the nearest names to a misspelt one."""

from __future__ import annotations

import pytest

from torchtrim.core.words import did_you_mean, first_line, listed, nearest


@pytest.mark.parametrize(
    ("words", "most", "said"),
    [
        ((), None, ""),
        (("a",), 1, "a"),
        (("a", "b"), 2, "a and b"),
        ((3, 1, 2), None, "3, 1 and 2"),
        ("abcdef", 2, "a, b and 4 more"),
        (("a", "b"), 1, "a and 1 more"),
    ],
)
def test_words_are_listed_and_the_others_counted(
    words: tuple[object, ...], most: int | None, said: str
) -> None:
    assert listed(words, most) == said


def test_the_nearest_names_are_as_they_are_written() -> None:
    known = ["offload_activations", "BITWISE", "TT201", "train.py"]
    assert nearest("offload-activation", known) == ["offload_activations"]
    assert did_you_mean("bitwse", known) == " Did you mean BITWISE?"
    assert did_you_mean("tt20", known, shown="`{}`".format) == " Did you mean `TT201`?"
    assert did_you_mean("xyzzy", known) == ""
    assert did_you_mean("ab", ["abc", "abd", "xy"], most=2) in (
        " Did you mean abc or abd?",
        " Did you mean abd or abc?",
    )


@pytest.mark.parametrize(("message", "said"), [("", ""), ("a", "a"), ("a: b\n\n  c\n", "a: b")])
def test_an_error_is_named_by_its_first_line(message: str, said: str) -> None:
    assert first_line(ValueError(message)) == said
