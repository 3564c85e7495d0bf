"""Budgets as a person writes them, and in bytes."""

import pytest

from torchtrim.errors import UsageError
from torchtrim.records.budget import Budget, memory_limit


def test_a_share_becomes_bytes_once_the_whole_is_known() -> None:
    assert memory_limit("60%", "rss").budget(1000) == Budget(600, "rss", asked="60%")
    assert memory_limit("2KiB").budget(1000).bytes == memory_limit(2048).budget(1).bytes == 2048


def test_what_cannot_be_read_is_refused_before_there_is_a_whole() -> None:
    with pytest.raises(UsageError, match="8GIG"):
        memory_limit("8GIG")


def test_the_bias_is_taken_off_what_may_be_simulated() -> None:
    assert Budget(100).biased(7).simulated == 93
