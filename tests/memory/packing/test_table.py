"""Tables of buffers: columns in any order, others kept, and errors that name the line and the column."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim.errors import UnreadableInput
from torchtrim.memory.packing import Buffer, table


def test_columns_in_any_order_and_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_bytes(
        b'\xef\xbb\xbfsize, upper ,note,id,lower\r\n8,5,"a, b",x,-1\r\n\r\n0,3,,"y ""z""",3\r\n'
    )
    read = table.read(path)
    assert read.buffers == [Buffer("x", -1, 5, 8), Buffer('y "z"', 3, 3, 0)]
    written = table.write(read, {"x": 16, 'y "z"': 0}).decode()
    assert written == 'size,upper,note,id,lower,offset\n8,5,"a, b",x,-1,16\n0,3,,"y ""z""",3,0\n'


def test_an_offset_that_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text("offset,id,lower,upper,size\n99,1,0,2,4\n")
    read = table.read(path)
    assert table.write(read, {"1": 7}) == b"offset,id,lower,upper,size\n7,1,0,2,4\n"


def test_alignments_are_read_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text("id,lower,upper,size,alignment\na,0,2,4,64\nb,0,2,4,\n")
    read = table.read(path)
    assert read.buffers == [Buffer("a", 0, 2, 4, 64), Buffer("b", 0, 2, 4)]
    assert table.write(read, {"a": 0, "b": 4}).decode().splitlines()[1] == "a,0,2,4,64,0"


@pytest.mark.parametrize(
    ("value", "words"),
    [("0", "alignment is 0"), ("-8", "alignment is -8"), ("x", "alignment is 'x'")],
)
def test_a_wrong_alignment_names_its_line(tmp_path: Path, value: str, words: str) -> None:
    path = tmp_path / "b.csv"
    path.write_text(f"id,lower,upper,size,alignment\na,0,2,4,1\nb,0,2,4,{value}\n")
    with pytest.raises(UnreadableInput, match=f"line 3: {words}"):
        table.read(path)


def test_a_table_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_text("id,lower,upper,size")
    assert table.write(table.read(path), {}) == b"id,lower,upper,size,offset\n"


HEAD = b"id,lower,upper,size\n1,0,2,4\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["line 1", "column 'id' is missing", "none"]),
        (b"id,lower,size\n", ["line 1", "column 'upper' is missing", "'size'"]),
        (b"id,size,lower,upper,size\n", ["line 1", "column 'size' is repeated"]),
        (HEAD + b"2,0,2\n", ["line 3", "3 values", "names 4"]),
        (HEAD + b"2,0,2,4,5\n", ["line 3", "5 values"]),
        (HEAD + b"2,zero,2,4\n", ["line 3", "lower", "'zero'", "whole number"]),
        (HEAD + b"2,0,2,4.5\n", ["line 3", "size", "'4.5'"]),
        (HEAD + b"2,0,2,1_0\n", ["line 3", "size", "'1_0'"]),
        (HEAD + b"2,0,,4\n", ["line 3", "upper", "''"]),
        (HEAD + b"2,0,2," + b"9" * 5000 + b"\n", ["line 3", "size", "..."]),
        (HEAD + b"2,0,2,-4\n", ["line 3", "size is -4"]),
        (HEAD + b"2,3,2,4\n", ["line 3", "upper is 2", "lower, 3"]),
        (HEAD + b",0,2,4\n", ["line 3", "id is empty"]),
        (HEAD + b"2,0,2,4\n1,0,2,4\n", ["line 4", "'1'", "line 2"]),
        (HEAD + b'2,0,2,"4\n', ["line 3", "comma-separated"]),
        (HEAD + b"\xff,0,2,4\n", ["line 3", "byte 28", "UTF-8"]),
        (HEAD + b"x" * 200_000 + b",0,2,4\n", ["line 3", "field larger"]),
    ],
)
def test_errors_name_line_and_column(tmp_path: Path, data: bytes, words: list[str]) -> None:
    path = tmp_path / "b.csv"
    path.write_bytes(data)
    with pytest.raises(UnreadableInput) as raised:
        table.read(path)
    message = str(raised.value)
    assert str(path) in message
    assert [word for word in words if word not in message] == []
    assert len(message) < 400


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(UnreadableInput, match="cannot read"):
            table.read(path)


@pytest.mark.parametrize("size", ["7\x1d", "\x1f7", "7\u2003", "7\u00a0", "\u0667"])
def test_a_size_among_signs_that_are_no_blanks_names_its_line(tmp_path: Path, size: str) -> None:
    path = tmp_path / "buffers.csv"
    path.write_text(f"id,lower,upper,size\na,0,1,{size}\n", encoding="utf-8")
    with pytest.raises(UnreadableInput, match="line 2: size is"):
        table.read(path)
