"""Every rule reads steps whose modules return scalars, empty tensors, tuples, dicts or None."""

from __future__ import annotations

import pytest

from odd_modules import LAYERS, profile_of
from torchtrim.rules.base import Rule
from torchtrim.rules.registry import all_rules


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_each_rule_reads_them(rule: Rule, layer: str) -> None:
    if rule.across is not None:
        found = [*rule.across([profile_of(layer)]), *rule.across([profile_of(layer)] * 2)]
    else:
        found = [*rule.check(profile_of(layer))]
    assert all(one.code == rule.code and one.message for one in found)
