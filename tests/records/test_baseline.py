import json
from pathlib import Path

import pytest

from torchtrim.errors import UnreadableInput
from torchtrim.records.baseline import Level, load_baseline, save_baseline

LEVELS = {
    "b.py::two": Level(syncs=0, peak_bytes=5),
    "a.py::one": Level(syncs=2, peak_bytes=7, device="emulated"),
}


def test_it_is_saved_in_the_order_of_the_ids_and_loaded(tmp_path: Path) -> None:
    save_baseline(LEVELS, tmp_path / "baseline.json")
    assert load_baseline(tmp_path / "baseline.json") == LEVELS
    written = json.loads((tmp_path / "baseline.json").read_text())
    assert list(written["tests"]) == ["a.py::one", "b.py::two"]


def test_a_missing_one_is_empty(tmp_path: Path) -> None:
    assert load_baseline(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ("[", "not a readable baseline"),
        ('{"tests": {"a": {"syncs": -1, "peak_bytes": 1}}}', "syncs|tests"),
        ('{"schema_version": 7}', "reads 1"),
    ],
)
def test_what_is_no_baseline(tmp_path: Path, contents: str, says: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(contents)
    with pytest.raises(UnreadableInput, match=says):
        load_baseline(path)
