import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.records.allow import MOST_ENTRIES, Entry, allow_text, load_allow, save_allow

ENTRY = Entry(
    code="TT101",
    path="pkg/train.py",
    function="Trainer.step",
    line_text='print("loss", loss.item())',
    count=3,
    reason="once an epoch",
)
text = st.text(max_size=40)
entries = st.builds(
    Entry,
    code=st.sampled_from(["TT101", "TT203"]),
    path=text,
    function=text,
    line_text=text,
    count=st.integers(0, 10**6),
    reason=text,
)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    save_allow([ENTRY], tmp_path / "allow.toml")
    assert load_allow(tmp_path / "allow.toml").allow == (ENTRY,)
    assert 'reason = "once an epoch"' in (tmp_path / "allow.toml").read_text()


@given(entries)
def test_any_text_comes_back(entry: Entry) -> None:
    tree = tomllib.loads(allow_text([entry]))["allow"][0]
    assert Entry(**tree) == entry


def test_what_is_empty_is_left_out_but_for_what_an_entry_needs() -> None:
    bare = Entry(code="TT201", path="", line_text="", count=1)
    assert allow_text([bare]).endswith(
        '[[allow]]\ncode = "TT201"\npath = ""\nline_text = ""\ncount = 1\n'
    )


def test_a_file_name_that_utf8_cannot_hold_is_no_crash() -> None:
    odd = Entry(code="TT101", path="caf\udce9.py", line_text="x", count=1)
    assert tomllib.loads(allow_text([odd]))["allow"][0]["path"] == "caf?.py"


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (b"[[allow", "not a readable allow-list"),
        (b"\xff", "not a readable allow-list"),
        (b'[[allow]]\ncode = "101"\npath = ""\nline_text = ""\ncount = 1', "allow[0].code"),
        (b'[[allow]]\ncode = "TT101"\npath = ""\nline_text = ""\ncount = -1', "allow[0].count"),
        (b'[[allow]]\ncode = "TT101"\npath = ""\nline_text = ""\ncount = 1.5', "allow[0].count"),
        (b'[[allow]]\ncode = "TT101"\npath = ""\nline_text = ""', "`count`"),
        (b'[[allow]]\ncode = "TT101"\npath = ""\nline_text = ""\ncount = 1\nline = 3', "`line`"),
        (b"allowed = []", "`allowed`"),
        (b"schema_version = 2", "this torchtrim reads 1"),
        (b'x = "' + b"a" * 2**22 + b'"', "at most"),
    ],
)
def test_what_is_no_allow_list_names_the_field(tmp_path: Path, contents: bytes, says: str) -> None:
    path = tmp_path / "allow.toml"
    path.write_bytes(contents)
    with pytest.raises(UnreadableInput) as error:
        load_allow(path)
    assert says in str(error.value)


def test_there_is_a_most_of_entries(tmp_path: Path) -> None:
    path = tmp_path / "allow.toml"
    one = "{code = 'TT101', path = '', line_text = '', count = 1},"
    path.write_text(f"allow = [{one * (MOST_ENTRIES + 1)}]")
    with pytest.raises(UnreadableInput, match="length <= 10000"):
        load_allow(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match="cannot read"):
        load_allow(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot write"):
        save_allow([ENTRY], tmp_path / "none" / "allow.toml")
