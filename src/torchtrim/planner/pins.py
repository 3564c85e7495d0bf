"""Pins of a plan: places that must stay unchanged, that must use a technique, or that must not use one.

A pattern is a place in a plan's notation, with `*` for any text and `?` for one character. Neither matches a
bracket, so a pattern selects ranges of a Sequential only if it contains brackets.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torchtrim.core.words import listed, nearest
from torchtrim.errors import UsageError
from torchtrim.executor.registry import Option, Settings, names
from torchtrim.step.edits import Edit
from torchtrim.step.step import Span, Step

KEEP, NEVER, EVERYWHERE = "keep", "never", "*"
Patterns = Mapping[str, Sequence[str]]  # By their pin: `keep`, `never`, or the name of a technique.
Spans = tuple[Span, ...]
_SHOWN = 6  # Arbitrary; the number of places that a message lists.
_ONE = r"[^\[\]]"


class _KeepPin(NamedTuple):
    where: str
    pattern: str
    spans: Spans


class _NeverPin(NamedTuple):
    """A technique that must not change the places of a pattern, nor run any task of modules it matches."""

    technique: str
    text: str
    spans: Spans

    def bars(self, option: Option, edit: Edit) -> bool:
        """Return True if an option of the technique changes one of the places, or part of it."""
        if option.technique != self.technique:
            return False
        if self.text == EVERYWHERE or compile_pattern(self.text).fullmatch(option.where):
            return True
        overwritten = (Span(task, task + 1) for task in edit.overwrites)
        return overlap((*edit.claims, *overwritten) or option.spans, self.spans)


class Pins:
    """The pins of a step. `options` are all options of the allowed techniques there.

    Raises `UsageError` for pins that match nothing or contradict each other.
    """

    def __init__(
        self, patterns: Patterns, step: Step, options: Sequence[tuple[Option, Edit]]
    ) -> None:
        self._step = step
        self._options = options
        self._kept = [one for text in patterns.get(KEEP, ()) for one in self._matching(text)]
        self._never = [self._barred(text) for text in patterns.get(NEVER, ())]
        self._settings: dict[tuple[str, str], Settings] = {}
        for option, _ in options:
            self._settings.setdefault(_key(option), option.settings)
        # Technique and place of each option that must be in every plan, with its pattern.
        self.forced = self._forced(patterns)
        self._refuse_contradictions()

    def may(self, option: Option, edit: Edit) -> bool:
        """Return True if `keep` and `never` permit an option."""
        kept = any(overlap(option.spans, pin.spans) for pin in self._kept)
        return not kept and not any(pin.bars(option, edit) for pin in self._never)

    def demands(self, option: Option) -> bool:
        """Return True if an option must be in every plan: the first of several for one place."""
        key = _key(option)
        return key in self.forced and option.settings == self._settings[key]

    def missing(self, options: Iterable[Option]) -> list[str]:
        """Return the pinned places that these options lack."""
        present = set(map(_key, options))
        return [where for name, where in self.forced if (name, where) not in present]

    def note(self) -> str:
        """Return a note on the pins; empty without pins."""
        places: defaultdict[str, list[str]] = defaultdict(list)
        for name, where in (*(("unchanged", kept.where) for kept in self._kept), *self.forced):
            places[name].append(where)
        for pin in self._never:
            places[f"never {pin.technique}"].append(pin.text)
        text = "; ".join(f"{name} at {listed(where, _SHOWN)}" for name, where in places.items())
        return f"pinned: {text}" if text else ""

    def _matching(self, text: str) -> list[_KeepPin]:
        known: defaultdict[str, list[Span]] = defaultdict(list)
        for call in self._step.calls:
            known[self._step.modules[call.module].path].append(call.span)
        modules = sorted(known)
        for option, _ in self._options:
            known.setdefault(option.where, list(option.spans))
        pattern = compile_pattern(text)
        matches = [(where, spans) for where, spans in known.items() if pattern.fullmatch(where)]
        if not matches:
            raise UsageError(
                f"{KEEP} = [{text!r}] under [pins] matches no module that the step calls. "
                f"Known places: {_most_similar(text, modules)}."
            )
        return [_KeepPin(where, text, tuple(spans)) for where, spans in matches]

    def _barred(self, text: str) -> _NeverPin:
        name, where = never_of(text)
        pattern = compile_pattern(where)
        modules = self._step.modules
        spans = tuple(c.span for c in self._step.calls if pattern.fullmatch(modules[c.module].path))
        places = [option.where for option, _ in self._options if option.technique == name]
        if not spans and not any(map(pattern.fullmatch, places)) and where != EVERYWHERE:
            known = _most_similar(where, places or [module.path for module in modules])
            raise UsageError(
                f"{NEVER} = [{text!r}] under [pins] matches no module that the step calls, and no place "
                f"of {name}. Known places: {known}."
            )
        return _NeverPin(name, where, spans)

    def _forced(self, patterns: Patterns) -> dict[tuple[str, str], str]:
        forced: dict[tuple[str, str], str] = {}
        for name, texts in patterns.items():
            if name in (KEEP, NEVER):
                continue
            if name not in names():
                raise UsageError(
                    f"[pins] has {name!r}, which is not a technique. Use {KEEP} for places that must not "
                    f"change, {NEVER} for techniques that must not be used at a place, or one of "
                    f"{', '.join(names())}."
                )
            offered = [option for option, _ in self._options if option.technique == name]
            for text in texts:
                for option in self._outermost(name, text, offered):
                    forced.setdefault(_key(option), text)
        return forced

    def _outermost(self, name: str, text: str, offered: Sequence[Option]) -> list[Option]:
        """Return the options that a pattern matches, without those inside another of them."""
        pattern = compile_pattern(text)
        matches = [
            option
            for option in offered
            if any(map(pattern.fullmatch, (option.where, *self._other_names(option))))
        ]
        if not matches:
            raise UsageError(self._no_match_error(name, text, offered))
        outer: list[Option] = []
        for option in sorted(matches, key=lambda match: -length(match.spans)):
            if not any(_all_inside(option.spans, other.spans) for other in outer):
                outer.append(option)
        return [option for option in matches if option in outer]

    def _other_names(self, option: Option) -> list[str]:
        """Return the modules with exactly the calls of an option; a plan names the outermost."""
        spans: defaultdict[int, list[Span]] = defaultdict(list)
        for call in self._step.calls:
            if call.graded and call.span.last > call.span.first:
                spans[call.module].append(call.span)
        modules = self._step.modules
        return [modules[n].path for n, calls in spans.items() if tuple(calls) == option.spans]

    def _no_match_error(self, name: str, text: str, offered: Sequence[Option]) -> str:
        pattern = compile_pattern(text)
        modules = [mod.path for mod in self._step.modules if pattern.fullmatch(mod.path)]
        why = f"{name} saves nothing at {listed(modules, _SHOWN)}" if modules else "No such place"
        hint = f"{name} has no place in this step, or is not allowed; see --allow."
        if offered:
            places = [option.where for option in offered]
            hint = f"It can be pinned at {_most_similar(text, places)}."
        return f"{name} = [{text!r}] under [pins] matches nothing. {why}. {hint}"

    def _refuse_contradictions(self) -> None:
        demanded = [(option, edit) for option, edit in self._options if self.demands(option)]
        for number, (option, edit) in enumerate(demanded):
            pin = f"{option.technique} = [{self.forced[_key(option)]!r}]"
            for kept in self._kept:
                if overlap(option.spans, kept.spans):
                    raise UsageError(
                        f"{pin} under [pins] changes `{option.where}`, and {KEEP} = [{kept.pattern!r}] "
                        f"keeps `{kept.where}`, which runs inside or around it. Remove one of them."
                    )
            for barred in self._never:
                if barred.bars(option, edit):
                    raise UsageError(
                        f"{pin} under [pins] changes `{option.where}`, where {NEVER} = "
                        f"['{barred.technique}:{barred.text}'] forbids that. Remove one of them."
                    )
            for other, more in demanded[:number]:
                if overlap(edit.claims, more.claims):
                    raise UsageError(
                        f"{pin} under [pins] changes `{option.where}`, and {other.technique} = "
                        f"[{self.forced[_key(other)]!r}] changes `{other.where}`: one runs inside the "
                        "other, and a plan changes a place only once. Remove one of them."
                    )


def never_of(text: str) -> tuple[str, str]:
    """Return the technique and the pattern of places of `TECHNIQUE:PLACE`, or of `TECHNIQUE` everywhere."""
    name, _, where = text.partition(":")
    if name.strip() not in names():
        raise UsageError(
            f"{NEVER} = [{text!r}] under [pins] names no technique. Write TECHNIQUE:PLACE, such as "
            f"'recompute:*.attn', or a technique alone for all places. Techniques: {', '.join(names())}."
        )
    return name.strip(), where.strip() or EVERYWHERE


def _key(option: Option) -> tuple[str, str]:
    return option.technique, option.where


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return the pattern as a regular expression that never backtracks over a star, so it fails quickly."""
    first, *parts = (re.escape(part).replace(r"\?", _ONE) for part in text.split("*"))
    if not parts:
        return re.compile(first)
    middle = "".join(f"(?>{_ONE}*?{part})" for part in parts[:-1])
    return re.compile(f"{first}{middle}{_ONE}*{parts[-1]}")


def overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Return True if two sequences of spans share a task."""
    return any(a.first < b.last and b.first < a.last for a in some for b in others)


def _all_inside(some: Spans, others: Spans) -> bool:
    return all(any(b.first <= a.first and a.last <= b.last for b in others) for a in some)


def length(spans: Iterable[Span]) -> int:
    """Return the number of tasks in spans that do not overlap."""
    return sum(span.last - span.first for span in spans)


def _most_similar(text: str, known: Sequence[str]) -> str:
    close = nearest(text.replace("*", ""), known, _SHOWN, 0.5)
    return listed([*close, *(name for name in known if name not in close)], _SHOWN)
