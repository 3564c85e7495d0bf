import sys
from pathlib import Path

import msgspec
import pytest

from profiles import Step, training_step
from report import samples
from torchtrim.cli.main import main
from torchtrim.observe.trace.decode import decode
from torchtrim.observe.trace.reader import read_trace
from torchtrim.records import Profile
from torchtrim.records.files import save_profile
from torchtrim.report import perfetto
from torchtrim.rules.prices import priced
from torchtrim.rules.registry import diagnose

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


def test_slices_of_a_track_lie_in_each_other() -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in of(exported(training_step()), "X"):
        start = event["ts"]
        tracks.setdefault((event["pid"], event["tid"]), []).append((start, start + event["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)


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
