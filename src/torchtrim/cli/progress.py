"""Progress of long work on stderr: the phase, its number, and the time spent and left."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import click

_STEP = re.compile(r"step (\d+) of (\d+)")
_ALONE = re.compile(r"then (\d+) techniques? alone")
_DIGITS = re.compile(r"\d+")
_STARTS, _TRYING = "the script starts", "trying "
IMPORTING, PLANNING, REPORT = "importing torch", "planning", "report"
_RECORDED, _UNRECORDED = 2, 0.55
"""Steps that a run records first, by default, and the share of their time that a later step takes."""
_MODULES = 1545  # that a verb imports before it runs a script: torch 2.13 and ours
_KNOWN = 0.5  # of the modules; arbitrary
_AFTER = {"run": 0.6, PLANNING: 0.4, "compare": 0.05, REPORT: 0.2, "trying": 0.2}
"""Seconds of what follows the imports, in seconds of the imports: a slow machine takes longer for both. These
and the next three were fitted on the scripts of `bench.progress.FITTED`."""
_FIRST = 0.8  # of the time of the first step so far, another step takes: the first is slower, and not over
_LATER_RUN = 1.0  # of the first run, which has further steps
_TRIED = 0.4  # of a run: one with a technique alone has fewer steps, after `_AFTER["trying"]` for its imports
_LATER = 0.3  # of what a line says is left; arbitrary
_OVERDUE = 0.3  # of the time that a phase has taken when it takes longer than expected


@dataclass
class _Phase:
    """One phase: its name, when it began, and when each of its steps began, if it is a run."""

    name: str
    began: float
    steps: list[float] = field(default_factory=list)
    of: int = 0
    is_run: bool = False
    ended: float = 0.0

    @property
    def pace(self) -> float | None:
        """Seconds of a step that is not recorded, None before the second step."""
        gaps = [b - a for a, b in zip(self.steps, self.steps[1:], strict=False)]
        if later := sorted(gaps[_RECORDED:]):
            return later[len(later) // 2]
        return _UNRECORDED * min(gaps) if gaps else None

    @property
    def length(self) -> float | None:
        """Expected seconds of a run up to the end of its last step, None before its second step."""
        if (pace := self.pace) is None:
            return None
        slow = max(_RECORDED - len(self.steps) + 1, 0) * (1 / _UNRECORDED - 1)
        return self.steps[-1] - self.began + (self.of - len(self.steps) + 1 + slow) * pace


class Phases:
    """The phases of a verb, known in advance as `expected`; their number never changes, and others are extra.

    `tell` takes texts such as `"original: step 2 of 5"`. A run that starts again is a phase of its own.
    `further`: steps of the first run after the counted ones, as for the times of operators. `imported`: the
    number of modules that are imported.
    """

    def __init__(
        self,
        expected: tuple[str, ...] = (),
        begins: str = IMPORTING,
        further: int = 2,
        clock: Callable[[], float] = time.monotonic,
        imported: Callable[[], int] = lambda: len(sys.modules),
    ) -> None:
        self.text = begins
        self._clock = clock
        self.began = clock()
        self._imported = imported
        self._expected = [*expected]
        self._further = further
        self._current = _Phase(begins, self.began)
        self._count = len(expected) + 1
        self._extra = 0
        self._is_extra = False
        self._alone = 0
        self._tried: list[float] = []
        self._first: _Phase | None = None
        self._unit: float | None = None

    def tell(self, text: str) -> bool:
        """Note the current work; return True if a phase begins."""
        name, colon, detail = text.partition(": ")
        name, detail = (name, detail) if colon else (_DIGITS.sub("", text).strip(), "")
        self.text = text
        again = detail == _STARTS and bool(self._current.steps)
        begins = name != self._current.name or again
        if begins:
            self._begin(name)
        self._current.is_run |= detail == _STARTS
        if match := _STEP.search(detail):
            self._current.of = int(match[2])
            while len(self._current.steps) < int(match[1]):
                self._current.steps.append(self._clock())
        if match := _ALONE.search(detail):
            self._alone = int(match[1])
        return begins

    def _begin(self, name: str) -> None:
        now = self._clock()
        self._unit = now - self.began if self._unit is None else self._unit
        if self._first is None and self._current.steps:
            self._current.ended = now
            self._first = self._current
        if self._current.name.startswith(_TRYING):
            self._tried.append(now - self._current.began)
        self._is_extra = name not in self._expected
        if self._is_extra:
            self._extra += 1
        else:
            del self._expected[: self._expected.index(name) + 1]
        self._alone = max(self._alone - name.startswith(_TRYING), 0)
        self._current = _Phase(name, now)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self.began

    @property
    def place(self) -> str:
        """The number of the phase, such as `"2 of 4"` or `"extra 1"`; empty if no phases are expected."""
        if self._count == 1:
            return ""
        number = f"{self._count - len(self._expected)} of {self._count}"
        return f"extra {self._extra}" if self._is_extra else number

    @property
    def left(self) -> float | None:
        """Expected seconds until the end, None while they are unknown.

        They follow from the time of the imports, then from the steps of the first run. Runs that were not
        foreseen, and a phase that takes longer than expected, raise them at once.
        """
        unit = self._import_seconds()
        if unit is None or self._count == 1:
            return None
        run = self._run_seconds(unit)
        others = sum(self._seconds_of(name, unit, run) for name in self._expected)
        since = self._clock() - self._current.began
        here = max(self._seconds_here(unit, run) - since, _OVERDUE * since)
        return here + others + self._tried_seconds(unit, run)

    def _import_seconds(self) -> float | None:
        """Return the seconds of the imports, as expected while they last."""
        if self._unit is not None or self._current.name != IMPORTING:
            return self._unit
        share = self._imported() / _MODULES
        return self.elapsed / min(share, 1.0) if share >= _KNOWN else None

    def _run_seconds(self, unit: float) -> float:
        """Return the expected seconds of a run of the script like the first."""
        if self._first is not None:
            return self._first.ended - self._first.began
        current = self._current
        if (length := current.length) is None:
            since = self._clock() - current.steps[-1] if current.steps else 0.0
            return max(_AFTER["run"] * unit, _FIRST * since * (current.of + self._further))
        return length + self._further * (current.pace or 0.0)

    def _tried_seconds(self, unit: float, run: float) -> float:
        """Return the expected seconds of the runs with one technique alone, and of planning after them."""
        if not self._alone:
            return 0.0
        each = min([self._seconds_of(_TRYING, unit, run), *self._tried])
        return self._alone * each + _AFTER[PLANNING] * unit

    def _seconds_of(self, name: str, unit: float, run: float) -> float:
        if name.startswith(_TRYING):
            return _TRIED * run + _AFTER["trying"] * unit
        return (
            _AFTER[name] * unit if name in _AFTER else _LATER_RUN * run + _AFTER["compare"] * unit
        )

    def _seconds_here(self, unit: float, run: float) -> float:
        """Return the expected seconds of the current phase."""
        current, first = self._current, self._first
        if current.name == IMPORTING:
            return unit
        if not current.is_run:
            return _AFTER.get(current.name, _AFTER[PLANNING]) * unit
        if first is None:
            return run
        if current.length is None or first.length is None:
            return self._seconds_of(current.name, unit, run)
        after = first.ended - first.began - first.length
        return current.length + min(after, after * current.of / first.of) + _AFTER["compare"] * unit

    def line(self) -> str:
        """Return the place, the text, and the time spent and left, in one line."""
        place = f"{self.place}  " if self.place else ""
        return f"{place}{_clean(self.text)}  {self.elapsed:.0f} s{self._left_words()}"

    def _left_words(self) -> str:
        left = self.left
        return "" if left is None else f", about {max(left, 1.0):.0f} s left"


def _clean(text: str) -> str:
    from torchtrim.cli.output import cleaned

    return cleaned(text)


class Reporter:
    """Shows the phases on stderr; the base class shows nothing."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self._lock = threading.Lock()
        self._over = threading.Event()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def tell(self, text: str) -> None:
        """Note the current work."""
        with self._lock:
            self.phases.tell(text)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


class _Threaded(Reporter):
    interval = 0.25

    def __init__(self, phases: Phases) -> None:
        super().__init__(phases)
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self.interval):
            with self._lock:
                self._look()

    def _look(self) -> None:
        """Show what has changed."""


class Log(_Threaded):
    """Prints a line with the time for each phase that begins, after each long silence, and where what is left
    becomes known or is found to be more.

    Prints nothing for work that is over at once. `every`: print a line for each text.
    """

    quiet_seconds = 0.7  # Arbitrary; shorter work needs no progress.
    most_silent_seconds = 20.0  # Arbitrary; a longer silence looks like a hang.

    def __init__(self, phases: Phases, *, every: bool = False) -> None:
        super().__init__(phases)
        self._every = every
        self._said = phases.elapsed
        self._end: float | None = None
        self._pending = True

    def tell(self, text: str) -> None:
        """Note the current work, and print a line if a phase begins."""
        with self._lock:
            changed = text != self.phases.text
            self._pending |= self.phases.tell(text) or (self._every and changed)
            self._look()

    def _look(self) -> None:
        elapsed, left = self.phases.elapsed, self.phases.left
        end = None if left is None else elapsed + left
        silent = elapsed - self._said >= self.most_silent_seconds
        if (self._pending or silent or self._is_later(end)) and (
            self._every or elapsed >= self.quiet_seconds
        ):
            self._pending = False
            self._said, self._end = elapsed, end
            self._write(f"{time.strftime('%H:%M:%S')}  {self.phases.line()}\n")

    def _is_later(self, end: float | None) -> bool:
        """Return True if the end is known only now, or far later than the last line says."""
        if end is None or self._end is None:
            return end is not None
        elapsed = self.phases.elapsed
        return end - self._end > max(_LATER * (self._end - elapsed), _LATER * elapsed / 2, 2.0)


class Line(_Threaded):
    """Shows one changing line on a terminal, and removes it in the end."""

    def tell(self, text: str) -> None:
        """Note the current work, and show it."""
        super().tell(text)
        with self._lock:
            self._look()

    def __enter__(self) -> Reporter:
        self._look()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._write("\r\x1b[K")

    def _look(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r{self.phases.line()[:width]}\x1b[K")


_running: list[Phases] = []


def interruption() -> str:
    """Return where the work of the verb was when it was interrupted, or an empty string before any."""
    if not _running:
        return ""
    phases = _running[-1]
    place = f" in phase {phases.place}" if phases.place else ""
    return f"{place} ({_clean(phases.text)}) after {phases.elapsed:.0f} s"


@contextmanager
def progress(
    *expected: str, begins: str = IMPORTING, further: int = 2
) -> Iterator[Callable[[str], None]]:
    """Report the progress of long work on stderr: on a terminal in one changing line, else line by line.

    `expected`: the names of its phases; `begins`: the name of the first, which it is in already; `further`:
    see `Phases`. With `--quiet`, report nothing; with `--verbose`, every text in a line of its own.
    """
    from torchtrim.records.files import written

    context = click.get_current_context(silent=True)
    amount = context.params.get("amount") if context is not None else None
    phases = Phases(expected, begins, further)
    _running[:] = [phases]
    written.clear()
    kind: Reporter
    if amount == "headline":
        kind = Reporter(phases)
    elif amount == "all" or not _is_terminal():
        kind = Log(phases, every=amount == "all")
    else:
        kind = Line(phases)
    with kind:
        yield kind.tell
    phases.text = "writing"


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
