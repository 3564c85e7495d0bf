"""`torchtrim pack`, as a person types it."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memory.packing.instances import cut
from torchtrim.cli.main import main
from torchtrim.memory.packing import packer, table, why_invalid

TEXT = "size,id,upper,lower,what\n100,a,2,0,first\n50,b,3,1,second\n70,c,4,2,third\n"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.csv").write_text(TEXT)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torchtrim", "pack", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


def test_text(run: Run) -> None:
    code, out, err = run("b.csv")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("PACKED  3 buffers in 150 bytes (150 B)")
    assert lines[1:3] == ["  bound    150 bytes live at one time: met", "  optimal  yes"]
    assert lines[-1] == "Offsets: torchtrim pack b.csv --out b.packed.csv"


def test_json(run: Run) -> None:
    code, out, err = run("b.csv", "--json", "--capacity", "150")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found.pop("seconds") >= 0
    assert found == {"height": 150, "lower_bound": 150, "optimal": True}


def test_over_capacity_is_exit_1_and_the_offsets_are_written(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("b.csv", "--capacity", "149", "--out", "o.csv")
    assert code == 1
    assert "149 bytes: 1 bytes short" in out
    read = table.read(tmp_path / "o.csv")
    with (tmp_path / "o.csv").open() as file:
        offsets = {row["id"]: int(row["offset"]) for row in csv.DictReader(file)}
    assert why_invalid(read.buffers, offsets, capacity=150) is None
    assert [row[-2] for row in read.rows] == ["first", "second", "third"]


def test_alignments_of_the_table_are_kept(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "id,lower,upper,size,alignment\na,0,2,100,64\nb,0,2,10,\nc,0,2,7,128\n"
    )
    code, out, _ = run("a.csv", "--out", "-")
    offsets = {row["id"]: int(row["offset"]) for row in csv.DictReader(out.splitlines())}
    assert code == 0
    assert (offsets["a"] % 64, offsets["c"] % 128) == (0, 0)


def test_interrupted_it_tells_and_writes_the_best_so_far(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(self: object, best: object) -> Iterator[object]:
        raise KeyboardInterrupt
        yield

    rows = [f"{b.id},{b.lower},{b.upper},{b.size}" for b in cut(3, 60)]
    (tmp_path / "s.csv").write_text("\n".join(["id,lower,upper,size", *rows]))
    monkeypatch.setattr(packer.Descent, "run", pressed)
    code, out, err = run("s.csv", "--out", "o.csv")
    assert code == 130
    assert "best packing so far" in err
    assert out.startswith("PACKED")
    written = table.read(tmp_path / "o.csv")
    at = {b.id: int(row[-1]) for b, row in zip(written.buffers, written.rows, strict=True)}
    assert why_invalid(written.buffers, at) is None


def test_offsets_on_stdout(run: Run) -> None:
    code, out, _ = run("b.csv", "--out", "-", "--alignment", "64", "--seconds", "0")
    assert code == 0
    rows = list(csv.DictReader(out.splitlines()))
    assert [int(row["offset"]) % 64 for row in rows] == [0, 0, 0]


def test_the_file_itself_can_be_written(run: Run, tmp_path: Path) -> None:
    assert run("b.csv", "--out", "b.csv")[0] == 0
    once = (tmp_path / "b.csv").read_text()
    assert run("b.csv", "--out", "b.csv")[0] == 0
    assert (tmp_path / "b.csv").read_text() == once


def test_a_picture(run: Run, tmp_path: Path) -> None:
    assert run("b.csv", "--svg", "b.svg", "--json")[0] == 0
    assert (tmp_path / "b.svg").read_text().startswith("<svg ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing.csv",), "cannot read missing.csv"),
        (("b.csv", "--capacity", "much"), "cannot read 'much'"),
        (("b.csv", "--alignment", "0"), "--alignment"),
        (("b.csv", "--seconds", "-1"), "--seconds"),
        (("b.csv", "--json", "--out", "-"), "both write to stdout"),
        (("b.csv", "--out", "no/such/folder.csv"), "cannot write no/such/folder.csv"),
        (("wrong.csv",), "wrong.csv, line 2: size is '4k'"),
        ((), "FILE"),
    ],
)
def test_wrong_use_is_exit_2(run: Run, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    (tmp_path / "wrong.csv").write_text("id,lower,upper,size\n1,0,2,4k\n")
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err
