"""The verbs, as a person types them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from torchtrim.cli.main import main
from torchtrim.records.files import load_plan
from torchtrim.records.report import Report

SCRIPTS = Path(__file__).parent.parent / "scripts"
PLAIN, FAULTS = str(SCRIPTS / "plain.py"), str(SCRIPTS / "faults.py")
QUICK = ("--steps", "1")


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


def test_optimize_then_run_then_verify(run, tmp_path: Path) -> None:
    code, out, err = run("optimize", PLAIN, "--memory", "85%", *QUICK)
    assert (code, err) == (0, "")
    assert "BITWISE" in out
    assert out.count("\n") <= 40
    folder = tmp_path / "torchtrim-out" / "plain"
    assert {f.name for f in folder.iterdir()} == {
        "plan.toml",
        "profile.json",
        "report.html",
        "report.json",
    }
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    assert report.planned is not None
    assert report.original is not None
    assert report.budget_bytes is not None
    assert report.planned.peak_bytes <= report.budget_bytes < report.original.peak_bytes
    plan = str(folder / "plan.toml")
    code, out, err = run("run", PLAIN, "--plan", plan, "--", "--epochs", "1")
    assert (code, out) == (0, "epoch 0\n")
    for said in (
        f"torchtrim: applied {plan}: ",
        "certified: identical to the original, bit for bit",
        f"torchtrim: 4 steps with {plan}: peak ",
        "within the budget of",
        "a step on cpu (median), predicted",
        "torchtrim: held in every step: Sequential as planned; inputs as certified",
    ):
        assert said in err
    code, out, err = run("run", PLAIN, "--plan", plan, "--quiet", "--", "--epochs", "1")
    assert (code, out) == (0, "epoch 0\n")
    assert "applied" not in err
    assert "steps with" not in err
    code, _, err = run("run", PLAIN, "--", "--epochs", "1")
    unplanned = "torchtrim: without --plan the script runs unchanged; there is --plan "
    assert (code, err) == (0, f"{unplanned}{Path(plan).relative_to(tmp_path)}\n")
    code, out, err = run("verify", PLAIN, "--plan", plan, "--json", *QUICK)
    assert code == 0
    assert json.loads(out)["certificate"]["verdict"] == "BITWISE"


@pytest.mark.slow
def test_a_budget_that_nothing_fits(run) -> None:
    code, out, _ = run("optimize", PLAIN, "--memory", "1%", "--json", *QUICK)
    report = json.loads(out)
    assert code == 1
    assert report["floor_bytes"] > report["budget_bytes"]
    assert report["planned"]["peak_bytes"] == report["floor_bytes"]
    assert report["certificate"]["verdict"] == "BITWISE"
    assert sum(part["bytes"] for part in report["peak_parts"]) > 0
    assert {lever["source"] for lever in report["levers"]} >= {"measured"}
    assert run(*shlex.split(report["next"])[1:])[0] == 0
    code, _, err = run("plan", PLAIN, "--memory", "1%", *QUICK)
    assert code == 1
    assert "no plan brings the peak" in err


def test_where_nothing_helps_it_says_so_and_what_to_look_at(run, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(512, 512)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(9):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(4, 512)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    code, out, _ = run("optimize", "one.py", "--memory", "60%", *QUICK)
    assert code == 1
    assert "Does not fit" in out
    assert "no allowed technique lowers the peak" in " ".join(out.split())
    page = tmp_path / "torchtrim-out/one"
    report = msgspec.json.decode((page / "report.json").read_bytes(), type=Report)
    assert report.original is not None
    assert report.floor_bytes == report.original.peak_bytes
    assert report.plan is not None
    assert report.plan.techniques == ()
    assert "Why it does not fit" in (page / "report.html").read_text()
    assert run(*shlex.split(report.next)[1:])[0] == 0


@pytest.mark.slow
def test_plan_with_its_frontier(run) -> None:
    code, out, _ = run("plan", PLAIN, "--memory", "85%", "--frontier", "--json", *QUICK)
    report = json.loads(out)
    assert code == 0
    peaks = [point["peak_bytes"] for point in report["frontier"]]
    assert len(peaks) > 2
    assert peaks[-1] < peaks[0]
    assert report["planned"] is None
    assert report["plan"]["predicted"]["peak_bytes"] <= report["budget_bytes"]


@pytest.mark.slow
def test_what_is_pinned_in_a_plan_holds_and_stays(run, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[pins]\nkeep = ["*.1"]\nrecompute = ["*.mlp"]\n')
    words = ("plan", PLAIN, "--memory", "100%", "--plan", "mine.toml", *QUICK)
    code, _, err = run(*words)
    assert code == 2
    assert "recompute = ['*.mlp'] under [pins] matches nothing" in err
    mine.write_text('[pins]\nkeep = ["*.1"]\nrecompute = ["*[4:8]"]\n')
    code, out, _ = run(*words)
    assert code == 0
    assert "pinned: unchanged at Sequential.1; recompute at Sequential[4:8]" in " ".join(
        out.split()
    )
    plan = load_plan(mine)
    assert plan.pins == {"keep": ("*.1",), "recompute": ("*[4:8]",)}
    assert [one.where for one in plan.techniques if one.name == "recompute"] == [
        ("Sequential[4:8]",)
    ]
    mine.write_text('[pins]\nkeep = "*.1"\n')
    code, _, err = run(*words)
    assert (code, mine.read_text()) == (2, '[pins]\nkeep = "*.1"\n')
    assert "mine.toml: Expected `array`, got `str` - at `$[...]`" in err


def test_a_plan_is_exported(run, tmp_path: Path) -> None:
    code, out, _ = run("plan", PLAIN, "--memory", "90%", "--export", "python", "--json", *QUICK)
    report = json.loads(out)
    assert code == 0
    assert report["certificate"]["verdict"] == "BITWISE"
    assert report["planned"]["peak_bytes"] <= report["budget_bytes"]
    text = (tmp_path / "torchtrim-out/plain/planned.py").read_text()
    assert "BITWISE over" in text
    assert all(repr(where) in text for where in report["plan"]["techniques"][0]["where"])
    words = ("plan", PLAIN, "--memory", "90%", "--export", "python", "--out", "other", "--frontier")
    assert run(*words)[0] == 2
    assert not (tmp_path / "other").exists()


def test_diagnose_and_its_limits(run, tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(512, 512)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(9):\n"
        "    model(torch.ones(4, 512)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad(set_to_none=False)\n"
    )
    code, out, _ = run("diagnose", "wide.py", "--json", *QUICK)
    report = json.loads(out)
    assert code == 0
    assert "TT202" in {f["code"] for f in report["findings"]}
    assert report["holders"]
    assert report["certificate"] is None
    assert not [f for f in report["findings"] if f["code"].startswith("TT1")]
    assert run("diagnose", "wide.py", "--max-peak", "1KiB", *QUICK)[0] == 1
    assert run("diagnose", "wide.py", "--max-peak", "1GiB", "--fail-on", "1B", *QUICK)[0] == 1


def test_waits_are_told_when_asked(run, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(9):\n"
        "    y = model(torch.ones(4, 8))\n"
        "    loss = y[y > 0].sum() + y.sum()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    total = loss.item()\n"
    )
    _, out, _ = run("diagnose", "waits.py", "--device", "emulated", "--json", *QUICK)
    findings = {f["code"]: f for f in json.loads(out)["findings"]}
    assert findings["TT101"]["line"] == 9
    assert findings["TT102"]["line"] == 6
    assert run("diagnose", "waits.py", "--device", "emulated", "--max-syncs", "0", *QUICK)[0] == 1
    assert run("diagnose", "waits.py", "--max-syncs", "0", *QUICK)[0] == 0


def test_verify_two_scripts(run, tmp_path: Path) -> None:
    text = Path(PLAIN).read_text()
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text(text.replace("lr=1e-3", "lr=1.001e-3"))
    code, out, _ = run("verify", "a.py", "b.py", "--json", *QUICK)
    certificate = json.loads(out)["certificate"]
    assert code == 1
    assert certificate["verdict"] == "NOT EQUAL"
    assert certificate["first_difference"]["op"].startswith("hyperparameter")


def test_what_varies_from_run_to_run_has_an_exit_code_of_its_own(run) -> None:
    varies = str(SCRIPTS.parent / "cases" / "faulty" / "varying" / "unseeded.py")
    code, out, _ = run("verify", varies, varies, *QUICK)
    assert code == 4
    assert "UNDECIDED: the original differs from run to run" in out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("optimize", "none.py", "--memory", "60%"), 2, "the script none.py does not exist"),
        (("optimize", PLAIN, "--memory", "lots"), 2, "cannot read 'lots'"),
        (("diagnose", PLAIN, "--device", "cuda"), 2, "no CUDA device"),
        (("diagnose", PLAIN, "--max-peak", "x"), 2, "cannot read 'x'"),
        (("nonsense",), 2, "there is no command"),
        (("run", PLAIN, "--plan", "none.toml"), 2, "the plan none.toml does not exist"),
        (("verify", PLAIN), 2, "--plan FILE or a second script"),
        (("explain", "TT999"), 2, "TT999"),
        (("diagnose", FAULTS, "--", "crash"), 3, "the sixth seal"),
        (("run", FAULTS, "--", "exit"), 3, ""),
        (("run", FAULTS, "--", "crash"), 1, "the sixth seal"),
    ],
)
def test_what_goes_wrong(run, words: tuple[str, ...], code: int, says: str) -> None:
    ended, out, err = run(*words)
    assert ended == code
    assert says in err
    assert out == ""


def test_a_plan_is_refused_for_another_script(run, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(Path(PLAIN).read_text())
    assert run("plan", "a.py", "--memory", "85%", *QUICK)[0] == 0
    plan = str(tmp_path / "torchtrim-out" / "a" / "plan.toml")
    code, _, err = run("run", PLAIN.replace("plain", "gan"), "--plan", plan)
    assert code == 2
    assert "the plan was made for a.py, not for gan.py. If you know" in err
    assert "\nPlan again: torchtrim optimize " in err
    text = Path(plan).read_text()
    Path(plan).write_text("\n".join(x for x in text.splitlines() if "script_sha256" not in x))
    code, _, err = run("run", PLAIN.replace("plain", "gan"), "--plan", plan)
    assert code == 2
    assert "another Sequential" in err
    assert "To plan again: torchtrim optimize " in err


def test_settings_from_pyproject(run, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.torchtrim]\nmemory = "90%"\nsteps = 1\n')
    code, out, _ = run("plan", PLAIN, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["steps"] == 1
    assert report["budget_bytes"] == int(report["original"]["peak_bytes"] * 0.9)
    (tmp_path / "pyproject.toml").write_text("[tool.torchtrim]\nmemori = 1\n")
    code, _, err = run("plan", PLAIN)
    assert code == 2
    assert "memori" in err


@pytest.mark.parametrize(("error", "code"), [("KeyboardInterrupt", 130), ("ValueError('no')", 1)])
def test_run_shows_an_exception_as_python_does(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, code: int
) -> None:
    # A process group of an earlier test leaves a hook that prints "[rank0]" before each line.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("TORCHTRIM_DEBUG")
    script = tmp_path / "ends.py"
    script.write_text(f"def work():\n    raise {error}\n\n\nwork()\n")
    python = subprocess.run([sys.executable, str(script)], capture_output=True, check=False)
    assert run("run", str(script)) == (code, "", python.stderr.decode())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tool = 5", "'tool' to 5 where a table belongs"),
        ("tool.torchtrim = []", "'torchtrim' to [] where a table belongs"),
        ("[tool.torchtrim]\nmemory = {a = 1}", "expected a string or a number"),
        ("[tool.torchtrim]\nsteps = true", "expected a string or a number"),
        ("[tool.torchtrim]\nsteps = 'x'", "'x' is not a valid integer"),
        ("[tool.torchtrim]\nmemory = 7\x1d", "cannot read"),
        ("[tool.torchtrim]\nstep = 7", "which is not a setting"),
    ],
)
def test_settings_that_cannot_be_meant(run, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    code, _, err = run("plan", PLAIN, "--memory", "60%")
    assert code == 2
    assert says in err


def test_a_folder_that_takes_no_files_is_refused_before_the_run(run, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    code, _, err = run("diagnose", PLAIN, "--out", "taken/here", "--timeout", "1")
    assert code == 2
    assert "cannot write into taken/here" in err
    assert {one.name for one in tmp_path.iterdir()} == {"taken"}


def test_explain_and_doctor(run) -> None:
    code, out, _ = run("explain")
    assert code == 0
    assert "TT101" in out
    code, out, _ = run("explain", "tt203")
    assert code == 0
    assert "Why is this bad?" in out
    code, out, _ = run("doctor", "--json")
    assert code == 0
    assert json.loads(out)["recorder"].startswith("works")


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m torchtrim explain | head -1"
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True
    )
    assert "Traceback" not in ended.stderr
