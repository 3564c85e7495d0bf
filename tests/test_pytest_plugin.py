"""The plugin, in sessions of their own, with a device that waits when a test says so."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from report import samples
from torchtrim import pytest_plugin
from torchtrim.analysis.peak import holders
from torchtrim.records.baseline import Level, load_baseline
from torchtrim.report import safe

pytest_plugins = ("pytester",)

ROOT = Path(__file__).parents[1]
NAME = "torchtrim-baseline.json"
QUIET = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
CONFTEST = f"""
import sys
from typing import NamedTuple
import pytest
sys.path.insert(0, {str(Path(__file__).parent)!r})
from report import samples
from torchtrim import pytest_plugin

class Device:
    waits, peak_bytes, profile, calls = [], 0, samples.profile(64), 0
    def wait(self, line, count=1):
        self.waits.append((samples.MODEL, line, "`.item()` reads a value", "host_read", count))
    def peak(self, mib):
        self.peak_bytes = mib * 2**20

DEVICE = Device()

@pytest.fixture
def device():
    return DEVICE

def measure(body, limits, root):
    DEVICE.device = limits.device
    for _ in range(limits.warmup + 1):
        DEVICE.waits, DEVICE.peak_bytes = [], 0
        DEVICE.calls += 1
        body()
    return DEVICE

pytest_plugin._measure = measure
"""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pytest_plugin, "_measure", pytest_plugin._measure)
    pytester.makeconftest(CONFTEST)
    installed = entry_points(group="pytest11", name="torchtrim")
    loads = () if installed else ("-p", "torchtrim.pytest_plugin")

    def session(body: str, *words: str, own: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_it=f"import pytest\nmark = pytest.mark.torchtrim\n{body}")
        runs = pytester.runpytest_subprocess if own else pytester.runpytest_inprocess
        return runs(*loads, *QUIET, *words)

    return session


def test_a_test_within_its_limits_passes(session) -> None:
    result = session(
        """
@mark(max_syncs=2, max_peak="300MiB")
def test_ok(device):
    device.wait(3, count=2)
    device.peak(300)
"""
    )
    result.assert_outcomes(passed=1)


def test_a_failure_lists_the_waits_and_the_holders(session) -> None:
    result = session(
        """
@mark(max_syncs=0, max_peak="300MiB")
def test_over(device):
    device.wait(43, count=2)
    device.wait(7)
    device.peak(412)
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "torchtrim: 3 host-device syncs, max_syncs=0",
            "peak 412 MiB, max_peak=300 MiB",
            "*-- torchtrim --*",
            "host-device syncs:",
            "  */models/encoder.py:7  `.item()` reads a value (host_read), 1 time",
            "  */models/encoder.py:43  `.item()` reads a value (host_read), 2 times",
            "peak 412 MiB, held by:",
            "*22.0 MiB*parameter*",
        ]
    )


def test_one_limit_alone_judges_nothing_else(session) -> None:
    result = session(
        """
@mark(max_syncs=0)
def test_peak(device):
    device.peak(9000)

@mark(max_peak=10)
def test_waits(device):
    device.wait(1)
"""
    )
    result.assert_outcomes(passed=2)


@pytest.mark.parametrize(("given", "calls"), [("", 2), ("warmup=0, ", 1), ("warmup=3, ", 4)])
def test_the_first_calls_are_exempt(session, given: str, calls: int) -> None:
    result = session(
        f"""
@mark({given}max_syncs=0)
def test_warm(device):
    if device.calls < {calls}:
        device.wait(1)

def test_calls(device):
    assert device.calls == {calls}
"""
    )
    result.assert_outcomes(passed=2)


def test_fixtures_parameters_classes_and_devices(session) -> None:
    result = session(
        """
@mark(max_syncs=1, device="emulated")
class TestIt:
    @pytest.mark.parametrize("count", [1, 2])
    def test_params(self, device, count, tmp_path):
        assert tmp_path.is_dir()
        assert device.device == "emulated"
        device.wait(1, count)
"""
    )
    result.assert_outcomes(passed=1, failed=1)


def test_a_test_that_fails_itself_fails_as_ever(session) -> None:
    result = session(
        """
@mark(max_syncs=0)
def test_wrong(device):
    assert 1 == 2
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*assert 1 == 2"])
    result.stdout.no_fnmatch_line("*-- torchtrim --*")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("0", "*does not take 0. Write it as*"),
        ("max_sync=0", "*does not take max_sync. Write it as*"),
        ("max_peak='lots'", "*max_peak of the mark torchtrim: cannot read 'lots'*"),
        (
            "max_syncs=-1",
            "*max_syncs of the mark torchtrim must be an integer of 0 or more, not -1.*",
        ),
        ("max_syncs=True", "*max_syncs*not True.*"),
        ("warmup=None", "*warmup*not None.*"),
        (
            "device='tpu'",
            "*device of the mark torchtrim must be cpu, emulated or cuda, not 'tpu'.*",
        ),
    ],
)
def test_a_wrong_mark_says_what_is_right(session, given: str, says: str) -> None:
    result = session(f"@mark({given})\ndef test_it(device): raise SystemExit('was run')\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([says])


def test_what_pytest_does_not_call_cannot_be_marked(session) -> None:
    result = session(
        """
import unittest

@mark(max_syncs=0)
class TestCase(unittest.TestCase):
    def test_it(self): pass

@mark(max_syncs=0)
async def test_later(): pass
"""
    )
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        [
            "*test functions that pytest calls itself, not on unittest methods or other items.",
            "*cannot be async.",
        ]
    )


def test_an_error_for_people_is_shown_without_a_traceback(session) -> None:
    result = session(
        """
@mark(max_syncs=0)
def test_it():
    from torchtrim.errors import Unsupported
    raise Unsupported("this operator cannot be run here")
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["torchtrim: this operator cannot be run here"])


LEVELS = """
@mark
def test_level(device):
    device.wait(1, {syncs})
    device.peak({peak})

def test_other(): pass
"""
UPDATE = "--torchtrim-update-baseline"


def level(syncs: int, peak: int) -> str:
    return LEVELS.format(syncs=syncs, peak=peak)


def test_a_baseline_is_written_and_kept_to(session, pytester: pytest.Pytester) -> None:
    result = session(level(2, 100), UPDATE)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([f"torchtrim: 1 test written to {NAME}"])
    known = Level(syncs=2, peak_bytes=100 * samples.MIB, device="cpu")
    assert load_baseline(pytester.path / NAME) == {"test_it.py::test_level": known}
    session(level(2, 105)).assert_outcomes(passed=2)
    result = session(level(3, 106))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "torchtrim: 3 host-device syncs, 2 in the baseline",
            "peak 106 MiB, 100 MiB in the baseline, tolerance 5%",
        ]
    )
    session(level(1, 110), "--torchtrim-tolerance", "10%").assert_outcomes(passed=2)
    session(level(2, 101), "--torchtrim-tolerance", "0%").assert_outcomes(passed=1, failed=1)


def test_an_update_keeps_the_tests_that_did_not_run(session, pytester: pytest.Pytester) -> None:
    session(level(1, 100), UPDATE)
    session("@mark\ndef test_new(device): device.peak(7)\n", UPDATE)
    assert list(load_baseline(pytester.path / NAME)) == [
        "test_it.py::test_level",
        "test_it.py::test_new",
    ]


def test_no_update_writes_a_failed_test_or_one_with_limits(
    session, pytester: pytest.Pytester
) -> None:
    body = """
@mark(max_syncs=1)
def test_limit(device): device.wait(1)

@mark
def test_wrong(device): assert 0
"""
    session(body, UPDATE).assert_outcomes(passed=1, failed=1)
    assert not (pytester.path / NAME).exists()


def test_without_a_baseline_there_is_nothing_to_hold_to(session) -> None:
    result = session(level(0, 1))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"*{NAME} has no entry for this test*{UPDATE}*"])


def test_a_baseline_of_another_device_is_not_comparable(session, pytester: pytest.Pytester) -> None:
    levels = {"test_it.py::test_level": {"syncs": 9, "peak_bytes": 10**9, "device": "cuda"}}
    (pytester.path / NAME).write_text(json.dumps({"tests": levels}))
    result = session(level(0, 1))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*baseline was recorded on cuda, but this test ran on cpu*"])


def test_a_damaged_baseline_names_the_field(session, pytester: pytest.Pytester) -> None:
    (pytester.path / NAME).write_text('{"tests": 3}')
    result = session(level(0, 1))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"*{NAME} is not a readable baseline*tests*"])


@pytest.mark.parametrize("tolerance", ["5", "x%", "-5%", "%", "1.2.3%"])
def test_a_tolerance_is_a_share(session, tolerance: str) -> None:
    result = session(level(0, 1), f"--torchtrim-tolerance={tolerance}", own=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--torchtrim-tolerance must be a percentage such as 5%*"])


@pytest.mark.slow
def test_under_xdist_the_first_process_writes(session, pytester: pytest.Pytester) -> None:
    body = "".join(f"@mark\ndef test_{i}(device): device.wait(1, {i} + 1)\n" for i in range(4))
    session(body, "-n", "2", UPDATE, own=True).assert_outcomes(passed=4)
    levels = load_baseline(pytester.path / NAME)
    assert [levels[f"test_it.py::test_{i}"].syncs for i in range(4)] == [1, 2, 3, 4]
    session(body, "-n", "2", own=True).assert_outcomes(passed=4)


def test_the_section_is_inert() -> None:
    class Measured:
        waits = ((samples.HOSTILE, 1, samples.HOSTILE, "row", 2),)
        peak_bytes = 5
        profile = samples.profile(64)

    text = pytest_plugin.section(Measured(), Path("/nowhere"))
    assert text == "\n".join(map(safe.clean, text.split("\n")))
    assert text.count("\n") == 2 + len(holders(Measured.profile, most=8))


def test_several_threads_measure_one_after_the_other() -> None:
    inside, most = 0, 0

    def body() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1

    def measure() -> None:
        pytest_plugin._measure(body, pytest_plugin.MarkLimits(device="cpu"), ROOT)

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_real_measurement_on_the_cpu() -> None:
    calls: list[int] = []

    def body() -> None:
        calls.append(len(calls))
        torch.ones(1024, 1024).sum().item()

    limits = pytest_plugin.MarkLimits(device="cpu", warmup=2)
    measured = pytest_plugin._measure(body, limits, ROOT)
    assert calls == [0, 1, 2]
    assert measured.peak_bytes >= 4 * samples.MIB
    assert measured.waits == ()


@pytest.mark.slow
def test_code_for_cuda_is_held_to_limits_without_a_gpu(session) -> None:
    result = session(
        """
import torch

@mark(max_syncs=0, max_peak="1MiB", device="emulated")
@pytest.mark.parametrize("reads", [False, True])
def test_step(reads):
    x = torch.ones(64, 64, device="cuda")
    if reads:
        x.sum().item()
""",
        "--noconftest",
        own=True,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["torchtrim: 1 host-device sync, max_syncs=0", "  test_it.py:*(*), 1 time"]
    )


def test_a_session_without_marked_tests_imports_no_torch(session) -> None:
    result = session(
        """
import sys

def test_it():
    assert "torchtrim.pytest_plugin" in sys.modules
    assert not {"torch", "numpy", "rich"} & set(sys.modules)
""",
        "--noconftest",
        own=True,
    )
    result.assert_outcomes(passed=1)


def test_the_mark_is_known_and_described(session) -> None:
    result = session("", "--markers", own=True)
    result.stdout.fnmatch_lines(['@pytest.mark.torchtrim(max_syncs=0, max_peak="300MiB"*'])


def test_the_package_offers_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"torchtrim": "torchtrim.pytest_plugin"}
    subprocess.run([sys.executable, "-c", "import torchtrim.pytest_plugin"], check=True)


STREAM = """
import torch
class Tracker(torch.nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.memory, self.keep, self.frame = {}, keep, 0
    def forward(self, image):
        self.memory[self.frame] = image * 2
        self.memory.pop(self.frame - self.keep, None)
        self.frame += 1
        return self.memory[self.frame - 1]

def stream(keep, frames=12):
    tracker = Tracker(keep)
    for frame in range(frames):
        tracker(torch.ones(256))
"""


@pytest.mark.slow
def test_growth_is_held_to_its_limit(session) -> None:
    result = session(
        STREAM
        + """
@mark(max_growth="64B")
def test_flat():
    stream(keep=3)

@mark(max_growth="0B")
def test_grows():
    stream(keep=1000)

@mark(max_growth="2KiB", frames_of="stream")
def test_few():
    stream(keep=3)
""",
        own=True,
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*KiB a frame (a call of Tracker), max_growth=0 B",
            "*test_it.py:*dict *memory grows by 1*",
        ],
        consecutive=False,
    )
    result.stdout.fnmatch_lines(["*1 frames were seen, but detecting growth takes 6*"])


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ('max_growth="much"', "cannot read 'much'"),
        ('max_growth="0B", max_peak="1MiB"', "mark two tests"),
        ('frames_of="Tracker"', "needs max_growth"),
    ],
)
def test_a_wrong_growth_is_refused(session, mark: str, words: str) -> None:
    result = session(f"@mark({mark})\ndef test_wrong(): pass\n")
    result.assert_outcomes(errors=1)
    assert words in result.stdout.str()
