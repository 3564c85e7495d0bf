"""pytest plugin: `@pytest.mark.torchtrim(max_syncs=0, max_peak="300MiB")` limits a test's syncs and peak.

Runs the body of a marked test `warmup` times, then once more, measured. `torchtrim.api.measure` handles one
call at a time, so tests of one process run one after another. With `max_growth="0B"` the body streams frames,
and the mark limits what each frame adds to memory; `frames_of` names the class or function whose call is one
frame. The plugin imports torch only for marked tests.
"""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from torchtrim.core.units import counted, format_apart, format_bytes, parse_bytes
from torchtrim.errors import TorchtrimError, UsageError

if TYPE_CHECKING:
    from torchtrim.api import Device, Measured
    from torchtrim.records.baseline import Level

FILE_NAME = "torchtrim-baseline.json"
_MARK = "torchtrim"
_USAGE = (
    'torchtrim(max_syncs=0, max_peak="300MiB", max_growth="0B", frames_of=None, warmup=1, '
    "device=None): limit a test's host-device syncs, its peak memory, or what each frame of a stream "
    "adds to memory; without a limit, compare with torchtrim-baseline.json."
)
_SECTION = pytest.StashKey[str]()
_LEDGER = pytest.StashKey["BaselineLedger"]()
_MOST_HOLDERS = 8  # Arbitrary; the section stays short.
_PROPERTY = "torchtrim_"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the baseline."""
    group = parser.getgroup("torchtrim", "host-device syncs and peak memory of marked tests")
    group.addoption(
        "--torchtrim-update-baseline",
        action="store_true",
        help="write what marked tests without limits measure to torchtrim-baseline.json",
    )
    group.addoption(
        "--torchtrim-tolerance",
        default="5%",
        metavar="SHARE",
        help="how far a peak may exceed its baseline; syncs may not (default: 5%%)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark and a listener for reports, including those of xdist workers."""
    config.addinivalue_line("markers", _USAGE)
    ledger = config.stash[_LEDGER] = BaselineLedger(config)
    config.pluginmanager.register(ledger, "torchtrim-ledger")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Reject an invalid mark before fixtures run."""
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return
    owner = getattr(item, "cls", None)
    if not isinstance(item, pytest.Function) or (owner and issubclass(owner, unittest.TestCase)):
        _fail(
            "the mark torchtrim works on test functions that pytest calls itself, not on unittest "
            "methods or other items."
        )
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        _fail("the mark torchtrim calls a test several times, so the test cannot be async.")
    MarkLimits.of(mark)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a marked test unmeasured, then measured, and check its limits."""
    mark = pyfuncitem.get_closest_marker(_MARK)
    if mark is None:
        return None
    limits = MarkLimits.of(mark)
    if limits.max_growth is not None:
        _judge_growth(pyfuncitem, limits)
    else:
        _judge(pyfuncitem, limits, _measured(pyfuncitem, limits))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add syncs and the holders of the peak to the report of a test that exceeds a limit."""
    report = yield
    if call.when == "call" and _SECTION in item.stash:
        report.sections.append(("torchtrim", item.stash[_SECTION]))
    return report


def _body(item: pytest.Function) -> Callable[[], object]:
    wanted = inspect.signature(item.obj).parameters
    arguments = {name: value for name, value in item.funcargs.items() if name in wanted}
    return lambda: item.obj(**arguments)


def _measured(item: pytest.Function, limits: MarkLimits) -> Measured:
    try:
        return _measure(_body(item), limits, item.config.rootpath)
    except TorchtrimError as error:
        _fail(str(error))


def _measure(body: Callable[[], object], limits: MarkLimits, root: Path) -> Measured:
    from torchtrim.api import measure

    return measure(body, warmup=limits.warmup, device=limits.device, project=root)


@dataclass(frozen=True, kw_only=True)
class MarkLimits:
    """The arguments of a mark. None: no limit."""

    max_syncs: int | None = None
    max_peak: int | None = None
    max_growth: int | None = None
    frames_of: str | None = None
    warmup: int = 1
    device: Device | None = None

    @property
    def explicit(self) -> bool:
        """True if the mark sets a limit; otherwise the baseline applies."""
        return self.max_syncs is not None or self.max_peak is not None

    @classmethod
    def of(cls, mark: pytest.Mark) -> MarkLimits:
        """Parse the arguments of a mark; fail the test if one is wrong."""
        known = {"max_syncs", "max_peak", "max_growth", "frames_of", "warmup", "device"}
        unknown = sorted(set(mark.kwargs) - known)
        if mark.args or unknown:
            wrong = repr(mark.args[0]) if mark.args else unknown[0]
            _fail(f"the mark torchtrim does not take {wrong}. Write it as\n{_USAGE}")
        amounts = {name: _amount(name, mark) for name in ("max_peak", "max_growth")}
        return cls(**{**mark.kwargs, **amounts}).checked()

    def checked(self) -> MarkLimits:
        """Return these limits; fail the test if a value or combination is invalid."""
        for name, value in (("max_syncs", self.max_syncs), ("warmup", self.warmup)):
            unlimited = value is None and name == "max_syncs"
            if not unlimited and (type(value) is not int or value < 0):
                _fail(
                    f"{name} of the mark torchtrim must be an integer of 0 or more, not {value!r}."
                )
        if self.max_growth is not None and self.explicit:
            _fail("max_growth does not combine with max_syncs or max_peak: mark two tests.")
        if self.frames_of is not None and (self.max_growth is None or not self.frames_of):
            _fail(
                "frames_of of the mark torchtrim names a class or a function and needs max_growth."
            )
        if self.device not in (None, "cpu", "emulated", "cuda"):
            _fail(
                f"device of the mark torchtrim must be cpu, emulated or cuda, not {self.device!r}."
            )
        return self


def _amount(name: str, mark: pytest.Mark) -> int | None:
    given = mark.kwargs.get(name)
    try:
        return None if given is None else parse_bytes(given, zero=name == "max_growth")
    except UsageError as error:
        _fail(f"{name} of the mark torchtrim: {error}")


def _judge_growth(item: pytest.Function, limits: MarkLimits) -> None:
    """Call a streaming test once and check what its frames add to memory."""
    from torchtrim.api import growing_state, measure_growth

    root = item.config.rootpath
    try:
        profile, stream = measure_growth(_body(item), frames_of=limits.frames_of, project=root)
    except TorchtrimError as error:
        _fail(str(error))
    assert limits.max_growth is not None
    if stream.growth_bytes > limits.max_growth:
        lines = [
            f"  {_place(one.path, one.line, root)}  {one.message}" for one in growing_state(profile)
        ]
        item.stash[_SECTION] = "\n".join(["what grows:", *lines])
        grew, most = format_apart(stream.growth_bytes, limits.max_growth)
        _fail(f"{grew} a frame ({stream.frame}), max_growth={most}")


def _judge(item: pytest.Function, limits: MarkLimits, measured: Measured) -> None:
    ledger = item.config.stash[_LEDGER]
    level = _level(measured)
    if limits.explicit:
        wrong = _over(level, limits)
    else:
        for name in ("syncs", "peak_bytes", "device"):
            item.user_properties.append((_PROPERTY + name, getattr(level, name)))
        wrong = ledger.compare(item.nodeid, level)
    if wrong:
        item.stash[_SECTION] = section(measured, item.config.rootpath)
        _fail("\n".join(wrong))


def _over(level: Level, limits: MarkLimits) -> list[str]:
    wrong = []
    if limits.max_syncs is not None and level.syncs > limits.max_syncs:
        wrong.append(f"{counted(level.syncs, 'host-device sync')}, max_syncs={limits.max_syncs}")
    if limits.max_peak is not None and level.peak_bytes > limits.max_peak:
        peak, most = format_apart(level.peak_bytes, limits.max_peak)
        wrong.append(f"peak {peak}, max_peak={most}")
    return wrong


def _level(measured: Measured) -> Level:
    from torchtrim.records.baseline import Level

    syncs = sum(count for *_, count in measured.waits)
    device = measured.profile.device.partition(":")[0]
    return Level(syncs=syncs, peak_bytes=measured.peak_bytes, device=device)


class BaselineLedger:
    """The baseline file and its pending updates. Under xdist only the controller writes it."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = config.rootpath / FILE_NAME
        self.updates: bool = config.getoption("--torchtrim-update-baseline")
        self._tolerance = _share(config.getoption("--torchtrim-tolerance"))
        self._writes = self.updates and not hasattr(config, "workerinput")
        self._known: Mapping[str, Level] | None = None
        self._found: dict[str, Level] = {}

    def compare(self, name: str, level: Level) -> list[str]:
        """Return what is worse than the baseline; nothing while the baseline is being updated."""
        if self.updates:
            return []
        known = self._baseline().get(name)
        if known is None:
            return [
                f"{self.path.name} has no entry for this test, and its mark sets no limit. Run pytest "
                "--torchtrim-update-baseline and commit the file, or set max_syncs or max_peak."
            ]
        return _worse(level, known, self._tolerance)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store what a passed test measured."""
        from torchtrim.records.baseline import Level

        found: dict[str, Any] = {
            name.removeprefix(_PROPERTY): value
            for name, value in report.user_properties
            if name.startswith(_PROPERTY)
        }
        if self._writes and report.when == "call" and report.passed and found:
            self._found[report.nodeid] = Level(**found)

    def pytest_sessionfinish(self) -> None:
        """Write the baseline; keep the entries of tests that did not run."""
        from torchtrim.records.baseline import save_baseline

        if self._writes and self._found:
            save_baseline({**self._baseline(), **self._found}, self.path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was written."""
        if self._writes:
            tests = counted(len(self._found), "test")
            terminalreporter.write_line(f"torchtrim: {tests} written to {self.path.name}")

    def _baseline(self) -> Mapping[str, Level]:
        from torchtrim.records.baseline import load_baseline

        if self._known is None:
            try:
                self._known = load_baseline(self.path)
            except TorchtrimError as error:
                _fail(str(error))
        return self._known


def _worse(level: Level, known: Level, tolerance: float) -> list[str]:
    if known.device and known.device != level.device:
        return [
            f"the baseline was recorded on {known.device}, but this test ran on {level.device}: not "
            "comparable. Give the mark a device."
        ]
    wrong = []
    if level.syncs > known.syncs:
        wrong.append(f"{counted(level.syncs, 'host-device sync')}, {known.syncs} in the baseline")
    if level.peak_bytes > known.peak_bytes * (1 + tolerance):
        peaks = f"peak {format_bytes(level.peak_bytes)}, {format_bytes(known.peak_bytes)}"
        wrong.append(f"{peaks} in the baseline, tolerance {tolerance:.0%}")
    return wrong


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    if not text.strip().endswith("%") or not number.strip().replace(".", "", 1).isdecimal():
        raise pytest.UsageError(
            f"--torchtrim-tolerance must be a percentage such as 5%, not {text!r}."
        )
    return float(number) / 100


def section(measured: Measured, root: Path) -> str:
    """Format the syncs and the holders of the peak, one a line."""
    from torchtrim.api import holders
    from torchtrim.report.holder_words import owner_of, reason_of
    from torchtrim.report.safe import clean

    lines = ["host-device syncs:" if measured.waits else "no host-device syncs"]
    lines += [
        f"  {_place(path, line, root)}  {what} ({row}), {counted(count, 'time')}"
        for path, line, what, row, count in sorted(measured.waits)
    ]
    lines.append(f"peak {format_bytes(measured.peak_bytes)}, held by:")
    for held in holders(measured.profile, most=_MOST_HOLDERS):
        words = f"{owner_of(held, str(root))}  {reason_of(held, str(root))}"
        lines.append(f"  {format_bytes(held.bytes):>9}  {words}")
    return "\n".join(map(clean, lines))


def _place(path: str, line: int, root: Path) -> str:
    from torchtrim.api import near

    return f"{near(path, str(root))}:{line}" if path else ""


def _fail(message: str) -> NoReturn:
    pytest.fail(f"torchtrim: {message}", pytrace=False)
