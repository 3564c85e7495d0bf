import json
import sys
from pathlib import Path

import pytest

from profiles import training_step
from report import samples
from report.test_changes import measured
from torchtrim.cli.main import main
from torchtrim.records.files import save_profile
from torchtrim.report.formats import json as as_json


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    for name, report in {
        "a": measured(0.60, 0.02),
        "b": measured(0.70, 0.02, peak=500),
        "noisy": measured(0.60, 0.90),
    }.items():
        Path(f"{name}.json").write_bytes(as_json.render(report))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torchtrim", "compare", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("a.json", "b.json"), 0),
        (("a.json", "b.json", "--fail-on", "50ms"), 1),
        (("a.json", "b.json", "--fail-on", "200ms"), 0),
        (("a.json", "b.json", "--fail-on", "80MiB"), 1),
        (("a.json", "b.json", "--fail-on", "10%"), 1),
        (("b.json", "a.json", "--fail-on", "1%"), 0),
        (("a.json", "noisy.json", "--fail-on", "1ms"), 0),
        (("a.json", "b.json", "--fail-on", "much"), 2),
        (("a.json", "missing.json"), 2),
    ],
)
def test_exit_codes(run, words: tuple[str, ...], code: int) -> None:
    assert run(*words)[0] == code


def test_json_says_what_is_over(run) -> None:
    code, out, _ = run("a.json", "b.json", "--fail-on", "50ms", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["schema_version"] == 1
    assert "--fail-on 50ms" in found["over"][0]
    assert run("a.json", "b.json", "--format", "markdown")[1].startswith("## torchtrim: ")


def test_profiles_and_what_is_neither(run, tmp_path: Path) -> None:
    save_profile(training_step(), tmp_path / "p.json")
    code, out, _ = run("p.json", "p.json")
    assert (code, out.splitlines()[0]) == (0, "no significant change")
    (tmp_path / "odd.json").write_text("{}")
    code, _, err = run("odd.json", "p.json")
    assert code == 2
    assert "neither a report nor a profile" in err
    (tmp_path / "cut.json").write_bytes(as_json.render(samples.OPTIMIZE)[:900])
    assert run("cut.json", "p.json")[0] == 2
