"""Saved profiles and plans: they come back, and what is damaged, hostile or newer is refused."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import Step, training_step
from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.records import Plan, Prediction, Profile, Technique, files
from torchtrim.records.comparison import load_report_or_profile
from torchtrim.records.files import (
    load_plan,
    load_profile,
    plan_text,
    read_bounded,
    read_head,
    save_plan,
    save_profile,
    write_atomically,
)


def profile() -> Profile:
    made = training_step(blocks=2)
    return made if isinstance(made, Profile) else made.profile()


def plan(**changes: object) -> Plan:
    made = Plan(
        torchtrim="0.1.0",
        script='odd "name"\\\n.py',
        script_sha256="ab",
        fingerprint={"Net": "12", "Net#2": "34"},
        budget_bytes=2**40,
        techniques=(
            Technique(
                name="recompute", where=("Net.a", "Net.b[0:2]"), options={"keep": True, "n": 3}
            ),
            Technique(name="recompute", where=()),
        ),
        predicted=Prediction(peak_bytes=7, step_seconds=0.25),
    )
    return msgspec.structs.replace(made, **changes)


def test_no_more_is_read_than_is_allowed_of_a_file_that_grows(tmp_path: Path) -> None:
    path, over = tmp_path / "grows", threading.Event()

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not over.is_set():
                file.write(b"x" * 4096)

    path.touch()
    thread = threading.Thread(target=grow)
    thread.start()
    try:
        while path.stat().st_size < 2**16:
            pass
        assert len(read_head(path, 2**15)) == 2**15
        with pytest.raises(UnreadableInput, match="at most 32768 bytes"):
            read_bounded(path, 2**15)
    finally:
        over.set()
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux has such files")
def test_a_file_that_says_it_is_empty_is_bounded() -> None:
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    assert len(read_head(path, 100)) == 100
    with pytest.raises(UnreadableInput, match="at most 100 bytes"):
        read_bounded(path, 100)


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    looks = files._check_regular
    monkeypatch.setattr(files, "_check_regular", lambda mode, path: looks(stat.S_IFREG, path))
    assert read_head(path, 100) == b""
    seen = iter((stat.S_IFREG, stat.S_IFIFO))
    monkeypatch.setattr(files, "_check_regular", lambda mode, path: looks(next(seen), path))
    with pytest.raises(UnreadableInput, match="it is a pipe"):
        read_bounded(path, 100)


def test_a_profile_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(profile(), path)
    assert load_profile(path) == profile()


def test_a_plan_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    save_plan(plan(), path)
    assert load_plan(path) == plan()


@given(st.text(), st.dictionaries(st.text(), st.text(max_size=9), max_size=4), st.lists(st.text()))
def test_any_names_come_back(script: str, roots: dict[str, str], where: list[str]) -> None:
    import tomllib

    made = plan(
        script=script, fingerprint=roots, techniques=(Technique(name="x", where=tuple(where)),)
    )
    try:
        text = plan_text(made).encode()
    except UnicodeEncodeError:
        return
    assert msgspec.convert(tomllib.loads(text.decode()), Plan) == made


@pytest.mark.parametrize("cut", [0, 1, 10, 1000, -1])
def test_a_truncated_profile_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "p.json"
    save_profile(profile(), path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UnreadableInput):
        load_profile(path)


def test_random_damage_never_crashes(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(profile(), path)
    whole = path.read_bytes()
    chance = random.Random(1)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        with contextlib.suppress(UnreadableInput):
            load_profile(path)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("schema_version", 3, "schema_version 3"),
        ("peak_bytes", -1, "peak_bytes"),
        ("peak_bytes", 2**80, "peak_bytes"),
        ("peak_bytes", "many", "peak_bytes"),
        ("device", None, "device"),
        ("places", [["x", 1]], "places"),
        ("operators", {}, "operators"),
    ],
)
def test_the_field_is_named(tmp_path: Path, field: str, value: object, says: str) -> None:
    tree = msgspec.to_builtins(profile())
    tree[field] = value
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(tree) if value != 2**80 else _huge(tree))
    with pytest.raises(UnreadableInput, match=says):
        load_profile(path)


def test_a_profile_of_an_older_version_is_refused_with_how_to_make_it_again(
    tmp_path: Path,
) -> None:
    tree = msgspec.to_builtins(profile()) | {"schema_version": 1}
    for name in ("saved", "saved_known", "rank", "world", "recorded_steps"):
        del tree[name]
    path = tmp_path / "p.json"
    for old in (tree, {name: value for name, value in tree.items() if name != "schema_version"}):
        path.write_bytes(msgspec.json.encode(old))
        for read in (load_profile, load_report_or_profile):
            with pytest.raises(
                UnreadableInput, match=r"older torchtrim.*torchtrim diagnose SCRIPT"
            ):
                read(path)


def test_a_report_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b'{"verb": "diagnose", "schema_version": 3}')
    with pytest.raises(UnreadableInput, match="schema_version 3, and this torchtrim reads 2"):
        load_report_or_profile(path)


def test_only_what_lies_on_the_device_counts() -> None:
    step = Step("cuda:0")
    weight = step.alive("parameter", 100)
    host = step.alive("input", 70, device="cpu", pool="pinned")
    out = step.op("aten::mul", weight, host, makes=40)
    step.op("aten::_to_copy", out, makes=40, device="cpu", pool="host")
    made = step.profile()
    assert [(s.bytes, s.counted) for s in made.storages] == [(100, 100), (70, 0), (40, 40), (40, 0)]
    assert made.peak_bytes == 140 + 40  # the last operator's transient is what the test says it is


def _huge(tree: dict[str, object]) -> bytes:
    tree["peak_bytes"] = 123454321
    return msgspec.json.encode(tree).replace(b"123454321", str(2**80).encode())


@pytest.mark.parametrize(
    ("table", "row", "column", "value"),
    [
        ("operators", 0, 2, 10**6),
        ("operators", 0, 3, 10**6),
        ("operators", 0, 6, 10**6),
        ("operators", 0, 9, [10**6]),
        ("storages", 0, 3, 10**6),
        ("calls", 0, 0, 10**6),
        ("calls", 0, 2, 10**6),
        ("modules", 0, 2, 5),
        ("saved", 0, 0, 10**6),
        ("saved", 0, 3, [1, 1]),
        ("saved", 0, 5, 10**6),
        ("saved", 0, 6, 10**6),
        ("saved", 0, 8, 10**6),
    ],
)
def test_wild_indices_are_refused(
    tmp_path: Path, table: str, row: int, column: int, value: object
) -> None:
    tree = msgspec.to_builtins(profile())
    tree[table][row] = list(tree[table][row])
    tree[table][row][column] = value
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(tree))
    with pytest.raises(UnreadableInput, match=table):
        load_profile(path)


def test_nesting_and_size_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b"[" * 10**6)
    with pytest.raises(UnreadableInput):
        load_profile(path)
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    with pytest.raises(UnreadableInput, match="at most 10"):
        load_profile(path)
    with pytest.raises(UnreadableInput, match="No such file"):
        load_profile(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "readable plan"),
        ("schema_version = 3", "schema_version 3"),
        ("torchtrim = 'x'", "missing"),
        ("a = [" * 10000, "readable plan"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UnreadableInput, match=says):
        load_plan(path)


def test_a_plan_edited_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(plan()).replace("recompute", "recompute "))
    assert load_plan(path).techniques[0].name == "recompute "
    path.write_text(plan_text(plan()).replace("budget_bytes = 1099511627776", "budget_bytes = -1"))
    with pytest.raises(UnreadableInput, match="budget_bytes"):
        load_plan(path)


def test_a_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_atomically(path, b"old")
    monkeypatch.setattr(Path, "replace", _fails)
    with pytest.raises(UsageError, match="full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="cannot write"):
        write_atomically(tmp_path / "no" / "f", b"new")


def _fails(*_: object) -> None:
    raise OSError(28, "the disk is full")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[pins]", "[pinz]", "`$.pinz`; did you mean `pins`?"),
        ("budget_bytes", "limit = 3\nbudget_bytes", "`$.limit`"),
        (
            "options =",
            "option = {}\noptions =",
            "`$.techniques[0].option`; did you mean `options`?",
        ),
        ("[predicted]", "[predicted]\nother = 1", "`$.predicted.other`"),
        ("budget_bytes", f"{'x' * 10**6} = 1\nbudget_bytes", f"`$.{'x' * 80}`"),
    ],
)
def test_a_field_that_no_plan_has_is_named(old: str, new: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    for version, advice in (("0.1.0", "Correct or remove"), ("99.1.dev0", "newer torchtrim")):
        path.write_text(plan_text(plan(torchtrim=version)).replace(old, new, 1))
        with pytest.raises(UnreadableInput) as error:
            load_plan(path)
        assert f"unknown field {named}" in str(error.value)
        assert advice in str(error.value)


def test_a_table_that_no_plan_has_is_named_where_pins_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[pinz]\nkeep = ["*"]\n')
    with pytest.raises(UnreadableInput, match=r"unknown field `\$.pinz`; did you mean `pins`\?"):
        files.load_pins(path)
