"""Tensors live at the peak in words: their owners and kinds."""

from __future__ import annotations

from torchtrim.records.report import Holder
from torchtrim.report.facts import place


def owner_of(holder: Holder, home: str = "") -> str:
    """Return `"Net.stem.1 BatchNorm2d, made at train.py:9"`; the kind if no module is known."""
    if not holder.module:
        return _kind(holder)
    made = place(holder.made_path, holder.made_line, home)
    is_root = holder.module.partition("#")[0] == holder.type  # Named by its class.
    words = holder.module if is_root else f"{holder.module} {holder.type}".rstrip()
    return f"{words}, made at {made}" if made else words


def reason_of(holder: Holder, home: str = "") -> str:
    """Return `"train.py:20: normalized input, saved by ReLU for backward"`."""
    where = place(holder.path, holder.line, home)
    words = ", ".join(filter(None, (holder.what, holder.why or _kind(holder))))
    return f"{where}: {words}" if where else words


def _kind(holder: Holder) -> str:
    return holder.kind.replace("_", " ")
