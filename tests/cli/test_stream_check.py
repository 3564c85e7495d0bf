"""`stream-check` and `verify --stream`, as a person types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from torchtrim.cli.main import main

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "streams.py")
pytestmark = pytest.mark.usefixtures("processes_are_not_traced")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torchtrim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


def test_what_grows_is_exit_1(run, tmp_path: Path) -> None:
    code, out, err = run("stream-check", SCRIPT, "--frames", "30", "--", "all")
    assert (code, err) == (1, "")
    assert out.startswith("Grows: ")
    assert "over the limit" in out
    assert "explain TT501" in out
    assert out.count("\n") <= 24
    report = json.loads((tmp_path / "torchtrim-out/streams/report.json").read_bytes())
    assert report["verb"] == "stream-check"
    assert report["stream"]["growth_bytes"] > report["stream"]["max_growth_bytes"] == 0
    assert report["original"] is None
    page = (tmp_path / "torchtrim-out/streams/report.html").read_text()
    assert "tracker.memory" in page


@pytest.mark.slow
def test_what_does_not_grow_is_exit_0(run) -> None:
    code, out, _ = run("stream-check", SCRIPT, "--max-growth", "0B", "--json", "--", "flat")
    report = json.loads(out)
    assert (code, report["findings"], report["stream"]["growth_bytes"]) == (0, [], 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stream-check", SCRIPT, "--max-growth", "little"), "cannot read 'little'"),
        (("stream-check", "no.py"), "the script no.py does not exist"),
        (("verify", "--stream", "no.py"), "the script no.py does not exist"),
    ],
)
def test_wrong_usage_is_exit_2(run, words: tuple[str, ...], said: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert said in err
