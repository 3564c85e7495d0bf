"""What a person pins: places at which nothing may change, and places at which a technique has to work.

A pattern is a place as plans write it, in which `*` matches anything and `?` one character. Neither
matches a bracket, so that ranges of a Sequential are only meant where a pattern says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from torchtrim.errors import UsageError
from torchtrim.executor.registry import Option, Settings, names
from torchtrim.step.edits import Edit
from torchtrim.step.step import Span, Step

KEEP = "keep"
Patterns = Mapping[str, Sequence[str]]
"""Patterns by what they pin: `keep`, or the name of a technique."""
Spans = tuple[Span, ...]
_SHOWN = 6  # Arbitrary; as many places as a message shows.
_ONE = r"[^\[\]]"


class _PinnedKeep(NamedTuple):
    where: str
    pattern: str
    spans: Spans


class Pinned:
    """The pins of a step. `options` are all that the allowed techniques offer there.

    Raises `UsageError` for pins that match nothing, and for pins that contradict each other.
    """

    def __init__(
        self, patterns: Patterns, step: Step, options: Sequence[tuple[Option, Edit]]
    ) -> None:
        self._step = step
        self._options = options
        self._kept = [one for text in patterns.get(KEEP, ()) for one in self._matching(text)]
        self._settings: dict[tuple[str, str], Settings] = {}
        for option, _ in options:
            self._settings.setdefault(_key(option), option.settings)
        self.forced = self._forced(patterns)
        """Technique and place of what has to be in every plan, with the pattern that says so."""
        self._check()

    def may(self, option: Option) -> bool:
        """Whether an option leaves alone what is to be kept."""
        return not any(overlap(option.spans, kept.spans) for kept in self._kept)

    def demands(self, option: Option) -> bool:
        """Whether an option has to be in every plan: of several for one place, the first that is offered."""
        key = _key(option)
        return key in self.forced and option.settings == self._settings[key]

    def missing(self, options: Iterable[Option]) -> list[str]:
        """The places of what has to be in every plan and is not among these."""
        there = {_key(option) for option in options}
        return [where for name, where in self.forced if (name, where) not in there]

    def note(self) -> str:
        """The pins, in words; empty for nothing."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for kept in self._kept:
            found["nothing changes"].append(kept.where)
        for name, where in self.forced:
            found[name].append(where)
        said = "; ".join(f"{what} at {_listed(where)}" for what, where in found.items())
        return f"pinned: {said}" if said else ""

    def _matching(self, text: str) -> list[_PinnedKeep]:
        """The places that a pattern of `keep` names."""
        known: defaultdict[str, list[Span]] = defaultdict(list)
        for call in self._step.calls:
            known[self._step.modules[call.module].path].append(call.span)
        modules = sorted(known)
        for option, _ in self._options:
            known.setdefault(option.where, list(option.spans))
        pattern = compiled(text)
        found = [
            _PinnedKeep(where, text, tuple(spans))
            for where, spans in known.items()
            if pattern.fullmatch(where)
        ]
        if not found:
            raise UsageError(
                f"{KEEP} = [{text!r}] under [pins] names no module that the step calls. "
                f"There are {_near(text, modules)}."
            )
        return found

    def _forced(self, patterns: Patterns) -> dict[tuple[str, str], str]:
        found: dict[tuple[str, str], str] = {}
        for name, texts in patterns.items():
            if name == KEEP:
                continue
            if name not in names():
                raise UsageError(
                    f"[pins] has {name!r}, which is no technique. Pin with {KEEP}, where nothing may change, "
                    f"or with one of {', '.join(names())}."
                )
            offered = [option for option, _ in self._options if option.technique == name]
            for text in texts:
                for option in self._outermost(name, text, offered):
                    found.setdefault(_key(option), text)
        return found

    def _outermost(self, name: str, text: str, offered: Sequence[Option]) -> list[Option]:
        """Of the options that a pattern names those that are in no other of them."""
        pattern = compiled(text)
        named = [
            option
            for option in offered
            if any(map(pattern.fullmatch, (option.where, *self._other_names(option))))
        ]
        if not named:
            raise UsageError(self._nothing(name, text, offered))
        found: list[Option] = []
        for option in sorted(named, key=lambda one: -_length(one.spans)):
            if not any(_within(option.spans, other.spans) for other in found):
                found.append(option)
        return [option for option in named if option in found]

    def _other_names(self, option: Option) -> list[str]:
        """The modules that do just what an option is about; a plan names the outermost."""
        spans: defaultdict[int, list[Span]] = defaultdict(list)
        for call in self._step.calls:
            if call.graded and call.span.last > call.span.first:
                spans[call.module].append(call.span)
        modules = self._step.modules
        return [modules[n].path for n, found in spans.items() if tuple(found) == option.spans]

    def _nothing(self, name: str, text: str, offered: Sequence[Option]) -> str:
        """The error for a technique's pattern that matches nothing."""
        pattern = compiled(text)
        there = [one.path for one in self._step.modules if pattern.fullmatch(one.path)]
        places = [option.where for option in offered]
        why = (
            f"There is {_listed(there)}, and {name} saves nothing there"
            if there
            else "No such place"
        )
        can = (
            f"It can be pinned at {_near(text, places)}."
            if places
            else (f"{name} has no place in this step, or is not allowed; --allow says what is.")
        )
        return f"{name} = [{text!r}] under [pins] matches nothing. {why}. {can}"

    def _check(self) -> None:
        """Raises `UsageError` where two pins contradict each other."""
        demanded = [(option, edit) for option, edit in self._options if self.demands(option)]
        for number, (option, edit) in enumerate(demanded):
            said = f"{option.technique} = [{self.forced[_key(option)]!r}]"
            for kept in self._kept:
                if overlap(option.spans, kept.spans):
                    raise UsageError(
                        f"{said} under [pins] changes `{option.where}`, and {KEEP} = [{kept.pattern!r}] "
                        f"keeps `{kept.where}`, which runs within it or around it. Take one of them out."
                    )
            for other, more in demanded[:number]:
                if overlap(edit.claims, more.claims):
                    raise UsageError(
                        f"{said} under [pins] changes `{option.where}`, and {other.technique} = "
                        f"[{self.forced[_key(other)]!r}] changes `{other.where}`: one runs within the "
                        "other, and a plan changes it once. Take one of them out."
                    )


def _key(option: Option) -> tuple[str, str]:
    return option.technique, option.where


def compiled(text: str) -> re.Pattern[str]:
    """As a regular expression that never goes back behind a star, so that none takes long to fail."""
    first, *parts = (re.escape(part).replace(r"\?", _ONE) for part in text.split("*"))
    if not parts:
        return re.compile(first)
    middle = "".join(f"(?>{_ONE}*?{part})" for part in parts[:-1])
    return re.compile(f"{first}{middle}{_ONE}*{parts[-1]}")


def overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether tasks of the one are tasks of the other."""
    return any(a.first < b.last and b.first < a.last for a in some for b in others)


def _within(some: Spans, others: Spans) -> bool:
    """Whether each of these is inside one of those."""
    return all(any(b.first <= a.first and a.last <= b.last for b in others) for a in some)


def _length(spans: Spans) -> int:
    return sum(span.last - span.first for span in spans)


def _near(text: str, known: Sequence[str]) -> str:
    """The names most like a pattern; the first ones where none is."""
    close = get_close_matches(text.replace("*", ""), known, _SHOWN, 0.5)
    return _listed([*close, *(one for one in known if one not in close)])


def _listed(where: Collection[str]) -> str:
    shown = ", ".join(list(where)[:_SHOWN])
    return f"{shown} and {len(where) - _SHOWN} more" if len(where) > _SHOWN else shown
