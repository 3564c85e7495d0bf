import pytest

from torchtrim.capture.versions import untested


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.13.1+cu130", "2.12.0a0+git1"])
def test_what_was_tested_needs_no_word(version: str) -> None:
    assert untested(version) is None


@pytest.mark.parametrize(
    ("version", "than"), [("2.10.1", "older"), ("1.13.0", "older"), ("3.0.0", "newer")]
)
def test_another_version_is_said(version: str, than: str) -> None:
    assert f"torch {version} is {than} than what torchtrim was tested with" in str(
        untested(version)
    )


def test_a_version_that_is_none_is_older() -> None:
    assert "older" in str(untested("unknown"))
