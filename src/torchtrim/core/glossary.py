"""The words of torchtrim's output, each in a sentence or two. `torchtrim explain WORD` prints them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from torchtrim.core.words import as_key

GLOSSARY: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""The meaning of each word, as it is written in the output."""
_ALSO = {
    "host-device sync": "sync",
    "host-device syncs": "sync",
    "identical": "BITWISE",
    "allocated": "peak",
    "verdict": "certificate",
    "proof": "certificate",
    "activations": "activation",
    "holders": "live at the peak",
    "fixes": "fix",
    "smallest is": "floor",
    "fits with": "lever",
}


def meaning(word: str) -> tuple[str, str] | None:
    """Return a word as it is written and its meaning, or None. Case and plurals do not matter."""
    key = as_key(word)
    known = {as_key(one): one for one in GLOSSARY} | {as_key(one): to for one, to in _ALSO.items()}
    name = known.get(key) or known.get(key.removesuffix("s"))
    return (name, GLOSSARY[name]) if name is not None else None
