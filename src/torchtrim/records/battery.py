"""The results of `torchtrim doctor --gpu FILE`: what is modelled beside what a GPU did."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Check(Struct, frozen=True, kw_only=True):
    """One check. `holds`: the device did what was modelled; `error`: why it could not be run."""

    name: str
    holds: bool
    expected: Any = None
    seen: Any = None
    details: dict[str, Any] = {}
    error: str = ""


class BatteryReport(Struct, frozen=True, kw_only=True):
    """All checks on one device."""

    device: str
    capability: str
    torch: str
    system: str
    checks: tuple[Check, ...] = ()

    @property
    def holds(self) -> bool:
        """True if every check holds."""
        return all(check.holds for check in self.checks)
