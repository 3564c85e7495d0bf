"""Renders a report as JSON for scripts."""

from __future__ import annotations

from typing import Any

import msgspec

from torchtrim.records import Report
from torchtrim.records.comparison import Comparison


def render(report: Report | Comparison, **_: object) -> bytes:
    """Return the report as indented UTF-8 JSON, with keys in a fixed order."""
    plain = _encodable(msgspec.to_builtins(report, order="deterministic"))
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value
