"""`torchtrim trace`, as a person types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from recordings import Recording, training
from torchtrim.cli.main import main
from torchtrim.records.trace import TraceReport


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torchtrim", "trace", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


def test_text(run, tmp_path: Path) -> None:
    training(3).write(tmp_path / "t.json.gz")
    code, out, err = run("t.json.gz")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("WAITS  3 sync calls, 3 blocking copies in 3 steps")
    assert len(lines) <= 24
    assert max(map(len, lines[:-1])) <= 80
    assert "train.py:10+ step" in out
    assert lines[-1].endswith("torchtrim trace t.json.gz --source .")


def test_json(run, tmp_path: Path) -> None:
    training(3).write(tmp_path / "t.json")
    code, out, _ = run("t.json", "--json")
    assert code == 0
    found = json.loads(out)
    assert msgspec.json.decode(out, type=TraceReport).sync_calls == 3
    assert {
        *("sync_calls", "blocking_copies", "span_ms", "replay_ms", "device_busy_ms"),
        *("host_waiting_ms", "sites", "sets", "bound", "schema_version", "torchtrim"),
    } <= found.keys()
    assert {*("path", "function", "line", "op", "count", "wait_ms", "saves_alone_ms")} <= found[
        "sites"
    ][0].keys()
    assert {"sites", "saves_ms"} == found["sets"][0].keys()


def test_a_limit_on_waits(run, tmp_path: Path) -> None:
    training(3).write(tmp_path / "t.json")
    assert run("t.json", "--max-syncs", "3")[0] == 0
    assert run("t.json", "--max-syncs", "2")[0] == 1
    training(1).write(tmp_path / "u.json")
    assert run("u.json", "t.json", "--max-syncs", "2", "--json")[0] == 1


def test_top_and_ranks(run, tmp_path: Path) -> None:
    made = Recording()
    for n in range(6):
        made.launch(n * 1000, 5, kernel=(n * 1000 + 10, 300))
        made.frame(f"train.py({n + 1}): f{n}", n * 1000 + 20, 400)
        made.op("aten::copy_", n * 1000 + 21, 390)
        made.read(n * 1000 + 22, n * 1000 + 330, at=n * 1000 + 311)
    made.write(tmp_path / "t.json")
    made.rank = 5
    made.write(tmp_path / "u.json")
    _, out, _ = run("t.json", "u.json", "--top", "2")
    assert "+4 more sites" in out
    assert "waits of each" in out


def test_no_waits(run, tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 5, kernel=(10, 50))
    made.write(tmp_path / "t.json")
    code, out, _ = run("t.json", "--max-syncs", "0")
    assert code == 0
    assert out.startswith("NO WAITS")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.json",), "cannot read none.json"),
        (("bad.json",), "not a readable profiler trace"),
        (("bad.json.gz",), "is damaged"),
        (("cpu.json",), "no device activities"),
        ((".", "--source", "nowhere"), "nowhere"),
        ((), "PATHS"),
    ],
)
def test_what_goes_wrong(run, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    (tmp_path / "bad.json").write_text("[[[[")
    (tmp_path / "bad.json.gz").write_bytes(b"\x1f\x8bnonsense and more of it")
    made = Recording()
    made.op("aten::add", 0, 5)
    made.write(tmp_path / "cpu.json")
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_names_that_mean_harm(run, tmp_path: Path) -> None:
    made = training(2)
    for event in made.events:
        event["name"] = event["name"].replace("train.py", "\x1b[31mt\u202erain\n.py")
    made.write(tmp_path / "t.json")
    _, out, _ = run("t.json")
    assert "\x1b" not in out
    assert "\u202e" not in out
