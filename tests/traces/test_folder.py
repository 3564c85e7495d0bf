"""Which files hold traces."""

from pathlib import Path

import pytest

from torchtrim.errors import UsageError
from torchtrim.traces.folder import MOST_FILES, find_traces


def test_files_and_folders(tmp_path: Path) -> None:
    deep = tmp_path / "plugins" / "profile"
    deep.mkdir(parents=True)
    for name in ("b.pt.trace.json", "a.pt.trace.json.gz", "other.json", "notes.txt"):
        (deep / name).write_text("{}")
    assert [p.name for p in find_traces([tmp_path])] == ["a.pt.trace.json.gz", "b.pt.trace.json"]
    single = deep / "other.json"
    assert find_traces([single, single]) == [single]
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "x.json").write_text("{}")
    assert find_traces([plain]) == [plain / "x.json"]


def test_none_and_too_many(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no trace"):
        find_traces([tmp_path])
    with pytest.raises(UsageError, match=f"at most {MOST_FILES}"):
        find_traces([tmp_path / f"{n}.json" for n in range(MOST_FILES + 1)])
