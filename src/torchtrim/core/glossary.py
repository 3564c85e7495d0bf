"""The words of torchtrim's output, each in a sentence or two. `torchtrim explain WORD` prints them."""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path

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
}


def meaning(word: str) -> tuple[str, str] | None:
    """Return a word as it is written and its meaning, or None. Case and plurals do not matter."""
    key = _key(word)
    known = {_key(one): one for one in GLOSSARY} | {_key(one): to for one, to in _ALSO.items()}
    name = known.get(key) or known.get(key.removesuffix("s"))
    return (name, GLOSSARY[name]) if name is not None else None


def near(word: str, others: list[str]) -> list[str]:
    """Return at most three known words or other names that look like this one."""
    names = {_key(one): one for one in (*GLOSSARY, *others)}
    return [names[one] for one in difflib.get_close_matches(_key(word), names, n=3)]


def _key(word: str) -> str:
    return re.sub(r"[\s_-]+", " ", word.strip().casefold())
