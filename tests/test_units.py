"""Amounts as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtrim.core.units import (
    check_bytes,
    format_apart,
    format_bytes,
    format_seconds,
    parse_bytes,
)
from torchtrim.errors import UsageError


@pytest.mark.parametrize(
    ("text", "amount"),
    [("8GiB", 8 * 2**30), ("8GB", 8 * 10**9), (" 1.5 kib ", 1536), ("1048576", 2**20), (7, 7)],
)
def test_amounts(text: str | int, amount: int) -> None:
    assert parse_bytes(text) == amount


def test_a_share_is_of_the_whole() -> None:
    assert parse_bytes("60%", whole=1000) == 600
    with pytest.raises(UsageError, match="percentage"):
        parse_bytes("60%")


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "8 GiBs", "8GIG", "-1GiB", "1e9", "0", 0, -5, "nan", "٣GiB", "0%", "9" * 400),
        *("9" * 400 + "%", 10**400, -(10**400), 2**63, "5000000TiB", True, 0.6, None, b"8GiB"),
    ],
)
def test_what_is_no_amount(text: str | int) -> None:
    with pytest.raises(UsageError) as error:
        parse_bytes(text, whole=100)
    assert len(str(error.value)) < 300
    with pytest.raises(UsageError):
        check_bytes(text, share=True)


def test_a_share_is_checked_before_its_whole_is_known() -> None:
    check_bytes("60%", share=True)
    with pytest.raises(UsageError, match="percentage"):
        check_bytes("60%")
    check_bytes("0B", zero=True)
    with pytest.raises(UsageError):
        check_bytes("0B")


@given(st.integers(1, 2**60))
def test_formatted_is_near(amount: int) -> None:
    assert parse_bytes(format_bytes(amount).replace(" ", "")) == pytest.approx(amount, rel=0.006)


def test_formats() -> None:
    assert format_bytes(-1536) == "-1.50 KiB"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(2**44) == "16.0 TiB"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(2) == "2.00 s"
    assert format_seconds(3e-6) == "3.00 us"


def test_amounts_that_differ_look_different() -> None:
    assert format_apart(2**20, 2**20 + 1) == ("1048576 B", "1048577 B")
    assert format_apart(2**20, 2**21) == ("1.00 MiB", "2.00 MiB")
    assert format_apart(13_723_512, 13_715_320) == ("13.09 MiB", "13.08 MiB")
    assert format_apart(2**20, 2**20 + 2**11, 2**20) == ("1.000 MiB", "1.002 MiB", "1.000 MiB")
    assert format_apart(2**20, 2**20) == ("1.00 MiB", "1.00 MiB")
