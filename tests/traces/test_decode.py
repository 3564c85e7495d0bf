"""JSON of traces: what is malformed is left out and said, or refused with the place."""

import gzip
import json
import zlib
from pathlib import Path

import pytest

from torchtrim.errors import UnreadableInput
from torchtrim.traces import decode as source
from torchtrim.traces.decode import decode, read_bytes

GOOD = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}


def decoded(document: object) -> tuple[int, list[str]]:
    found = decode(json.dumps(document).encode(), "t.json")
    return len(found.events), found.notes


def test_old_and_new_forms() -> None:
    assert decoded([GOOD, GOOD]) == (2, [])
    assert decoded({"traceEvents": [GOOD]}) == (1, [])
    found = decode(json.dumps({"traceEvents": [GOOD], "cuda_runtime_version": 12040}).encode(), "t")
    assert found.meta.versions == {"cuda_runtime_version": 12040}


@pytest.mark.parametrize(
    "bad",
    [
        {**GOOD, "ts": "soon"},
        {**GOOD, "dur": [1]},
        {**GOOD, "name": 3},
        {**GOOD, "args": {"correlation": {"a": 1}}},
        {**GOOD, "ts": None},
        7,
        None,
        [],
    ],
)
def test_wrong_types_are_left_out_and_said(bad: object) -> None:
    count, notes = decoded({"traceEvents": [GOOD, bad, GOOD]})
    assert count == 2
    assert len(notes) == 1
    assert "1 of 3 events" in notes[0]


def test_numbers_that_json_does_not_have() -> None:
    text = '{"traceEvents": [{"ph": "X", "name": "NaN inf", "cat": "kernel", "args": {"x": NaN, '
    text += '"bytes": -Infinity}, "ts": 1, "dur": 2}]}'
    found = decode(text.encode(), "t.json")
    assert found.events[0].name == "NaN inf"
    assert "NaN or infinity" in found.notes[0]


def test_huge_numbers() -> None:
    huge = {**GOOD, "args": {"correlation": 123456789012345678901234567890}}
    count, notes = decoded([GOOD, huge])
    assert (count, notes) == (2, [])
    beyond = json.dumps([GOOD, {**GOOD, "ts": 7777}]).replace("7777", "1e400").encode()
    found = decode(beyond, "t")
    assert len(found.events) == 1
    assert "1 of 2 events" in found.notes[0]


@pytest.mark.parametrize("bare", [True, False])
def test_a_file_that_ends_in_the_middle(bare: bool) -> None:
    events = [{**GOOD, "args": {"stream": n}} for n in range(20)]
    text = json.dumps(events if bare else {"schemaVersion": 1, "traceEvents": events}).encode()
    found = decode(text[: len(text) * 3 // 4], "t.json")
    assert 10 <= len(found.events) < 20
    assert "cut off" in found.notes[0]
    assert str(len(found.events)) in found.notes[0]


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"traceEvents": ' + b"[" * 100_000,
        b'{"traceEvents": [{"args": {"x": ' + b'{"a":' * 100_000,
        b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b', "traceEvents": []}',
        b"\xff\xfe\x00",
        b'{"a": 1}',
        b"12",
        b'"text"',
        b'{"traceEvents": 3}',
        b'{"traceEvents": [{"ph"',
    ],
)
def test_what_is_no_trace(data: bytes) -> None:
    with pytest.raises(UnreadableInput, match=r"no readable|nested too deeply"):
        decode(data, "t.json")


def test_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.json.gz", tmp_path / "b.json"
    plain.write_bytes(b"{}")
    packed.write_bytes(gzip.compress(b"[1]", mtime=0) + gzip.compress(b"[2]"))
    assert read_bytes(plain) == b"{}"
    assert read_bytes(packed) == b"[1][2]"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (gzip.compress(b"x" * 10_000, mtime=0)[:40], "cut off"),
        (gzip.compress(bytes(range(256)) * 40, mtime=0)[:-8] + b"\xff" * 8, "is damaged"),
        (b"\x1f\x8b" + b"nonsense" * 9, "is damaged"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(data)
    with pytest.raises(UnreadableInput, match=says) as error:
        read_bytes(path)
    assert str(path) in str(error.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none.json", "cannot read"), (tmp_path, "is no file")):
        with pytest.raises(UnreadableInput, match=says):
            read_bytes(path)


def test_a_limit_on_what_unpacks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"ab" * 600, mtime=0))
    assert len(read_bytes(path, 1200)) == 1200
    with pytest.raises(UnreadableInput, match=r"more than 1199 bytes.*active=1"):
        read_bytes(path, 1199)


def test_ten_gigabytes_of_brackets_stop_early(tmp_path: Path) -> None:
    """What shrinks a thousand times is refused long before the limit on size."""
    packer = zlib.compressobj(wbits=31)
    block = b"[" * 2**20
    path = tmp_path / "bomb.json.gz"
    with path.open("wb") as file:
        for _ in range(10_000 // 40):
            file.write(packer.compress(block))
        file.write(packer.flush())
    with pytest.raises(UnreadableInput, match="250 times its size"):
        read_bytes(path, 2**30)
    assert source._RATIO_FROM < 250 * 2**20
