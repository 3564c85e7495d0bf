"""Bytes of trace files: bounded, and refused where they are damaged."""

import gzip
import zlib
from pathlib import Path

import pytest

from torchtrim.errors import UnreadableInput
from torchtrim.traces import compressed as source
from torchtrim.traces.compressed import read_bytes


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
