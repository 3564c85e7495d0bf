import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from profiles import Step, training_step
from report import samples
from torchtrim.analysis.prices import priced
from torchtrim.cli.main import main
from torchtrim.records import Profile
from torchtrim.records.files import save_profile
from torchtrim.report import perfetto
from torchtrim.rules.registry import diagnose
from torchtrim.traces.reader import decode, read_trace

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
TICK = 2e-3
REQUIRED = {"X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "i": {"ts", "s"}, "M": {"args"}}


def exported(profile: Profile, **options: bool) -> dict:
    findings, waiting = priced(profile, diagnose(profile))
    return msgspec.json.decode(perfetto.render(profile, findings, waiting, **options))


def waits() -> Profile:
    step = Step("emulated")
    weight = step.alive("parameter", 4 * 2**20)
    with step.module("net", "Net"), step.module("net.0", "Linear"):
        made = step.op("aten::mul", weight, makes=4 * 2**20, line=3)
        read = step.op("aten::_local_scalar_dense", made, line=4)
    step.sync("item", read)
    step.wait(0.01)
    return step.profile()


def many() -> Profile:
    """Modules in modules, reads in backward, and a name that JSON must escape."""
    step = Step("emulated")
    weight = step.alive("parameter", 4 * 2**20)
    with step.module("net", "Net"):
        for number in range(40):
            with step.module(f'net."{number}\x07', "Block"):
                made = step.op("aten::mul", weight, makes=2**20, line=number)
                if number % 3 == 0:
                    step.sync("item", step.op("aten::_local_scalar_dense", made, phase="backward"))
    return step.profile()


def of(trace: dict, ph: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == ph]


@pytest.mark.parametrize("profile", [training_step(), waits(), samples.profile(412)])
def test_every_event_has_what_the_format_asks_for(profile: Profile) -> None:
    trace = exported(profile)
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid"} <= event.keys()
        assert REQUIRED[event["ph"]] <= event.keys()
        assert event.get("dur", 0) >= 0
    operators = [event for event in of(trace, "X") if event["cat"] == "cpu_op"]
    assert len(operators) == len(profile.operators)
    peak = max(sum(event["args"].values()) for event in of(trace, "C"))
    assert peak == profile.tracked_peak_bytes


def strict(text: bytes) -> dict:
    """JSON as its grammar has it: one document, no NaN or Infinity, no key twice."""

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    def once(pairs: list[tuple[str, object]]) -> dict:
        assert len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    return json.loads(text, parse_constant=refused, object_pairs_hook=once)


def accepted(trace: dict) -> None:
    """What the Trace Event Format demands of a document's events.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    tracks: dict[tuple[int, int], list[dict]] = {}
    latest: dict[tuple[int, int], float] = {}
    begun: dict[tuple[int, int], list[str]] = {}
    flows: dict[object, list[str]] = {}
    for event in trace["traceEvents"]:
        ph, track = event["ph"], (event["pid"], event.get("tid", 0))
        assert type(event["name"]) is str
        assert all(type(one) is int for one in track)
        if ph == "M":
            assert event["name"] in METADATA
            continue
        assert type(event["ts"]) in (int, float)
        assert event["ts"] >= 0
        if ph in "BE":
            stack = begun.setdefault(track, [])
            assert latest.get(track, 0) <= event["ts"]
            latest[track] = event["ts"]
            stack.append(event["name"]) if ph == "B" else stack.pop()
        elif ph == "X":
            assert event["dur"] >= 0
            tracks.setdefault(track, []).append(event)
        elif ph in "stf":
            flows.setdefault(event["id"], []).append(ph)
        elif ph == "C":
            assert event["args"]
            assert all(type(value) in (int, float) for value in event["args"].values())
            assert latest.get(track, 0) <= event["ts"]
            latest[track] = event["ts"]
        else:
            assert ph == "i"
            assert event["s"] in "gpt"
    assert not any(begun.values())
    assert all(ends[0] == "s" and ends[-1] == "f" for ends in flows.values())
    for events in tracks.values():
        in_order(events)


def in_order(events: list[dict]) -> None:
    """Slices of a track begin one after the other, and lie in each other or apart."""
    starts = [(event["ts"], event["cat"]) for event in events]
    if events[0]["cat"] != "module":
        assert starts == sorted(starts)
    open_until: list[float] = []
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + TICK:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + TICK
        open_until.append(end)


@pytest.mark.parametrize("make", [training_step, waits, lambda: samples.profile(412), many])
def test_the_document_is_strict_json_of_the_trace_event_format(make: Callable) -> None:
    profile = make()
    findings, waiting = priced(profile, diagnose(profile))
    text = perfetto.render(profile, findings, waiting)
    accepted(strict(text))
    assert strict(text) == msgspec.json.decode(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ph": "X", "ts": 1.0, "dur": -1.0, "cat": "cpu_op"},
        {"ph": "X", "ts": -1.0, "dur": 1.0, "cat": "cpu_op"},
        {"ph": "B", "ts": 1.0},
        {"ph": "C", "ts": 1.0, "args": {"bytes": "9"}},
        {"ph": "i", "ts": 1.0, "s": "x"},
        {"ph": "s", "ts": 1.0, "id": 7},
        {"ph": "M"},
    ],
)
def test_what_the_format_does_not_have_is_told(wrong: dict) -> None:
    with pytest.raises(AssertionError):
        accepted({"traceEvents": [{"name": "one", "pid": 1, "tid": 1, **wrong}]})


def test_two_slices_that_cross_are_told() -> None:
    about = {"name": "one", "ph": "X", "pid": 1, "tid": 1, "cat": "cpu_op"}
    with pytest.raises(AssertionError):
        accepted({"traceEvents": [{**about, "ts": 0, "dur": 5}, {**about, "ts": 3, "dur": 5}]})


def test_our_own_reader_reads_it(tmp_path: Path) -> None:
    findings, waiting = priced(waits(), diagnose(waits()))
    path = tmp_path / "trace.json"
    path.write_bytes(perfetto.render(waits(), findings, waiting))
    trace = read_trace(path)
    assert [event.name for event in trace.operators] == ["aten::mul", "aten::_local_scalar_dense"]
    assert trace.activities
    assert trace.notes == []
    cpu = perfetto.render(training_step(), (), None)
    assert decode(cpu, "cpu").notes == []


def test_findings_are_annotations_at_their_line() -> None:
    found = {event["name"]: event for event in of(exported(waits()), "i")}
    finding = found["TT101"]
    assert "modelled" in finding["args"]["price"]
    assert finding["args"]["place"].endswith(":4")
    assert finding["ts"] > 0


def test_the_verb_and_without_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(samples.profile(412, name=samples.HOSTILE), tmp_path / "profile.json")
    out = tmp_path / "out.json"
    words = ["torchtrim", "export", str(tmp_path / "profile.json"), "--perfetto", str(out)]
    monkeypatch.setattr(sys, "argv", [*words, "--no-source"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert "ui.perfetto.dev" in capsys.readouterr().out
    text = out.read_text()
    for leak in ("encoder.py", "segmenter", "\\u001b", "\u202e"):
        assert leak not in text
