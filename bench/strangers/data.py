"""Small generated data in the layouts that public programs read: pictures, text, graphs. All is seeded."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import string
import struct
from collections.abc import Callable
from pathlib import Path

import numpy

WORDS = (
    "the",
    "a",
    "small",
    "old",
    "river",
    "house",
    "tree",
    "stone",
    "bird",
    "sees",
    "finds",
    "keeps",
)


def sentences(count: int, seed: int = 0) -> list[str]:
    """So many sentences of five to nine words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 9))) + "." for _ in range(count)]


def mnist(folder: Path, count: int = 2048) -> None:
    """The four files of MNIST, as `torchvision.datasets.MNIST(folder)` finds them."""
    draw = numpy.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, size in (("train", count), ("t10k", count // 4)):
        pictures = draw.integers(0, 256, (size, 28, 28), dtype=numpy.uint8)
        labels = draw.integers(0, 10, size, dtype=numpy.uint8)
        header = struct.pack(">IIII", 2051, size, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pictures.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 2049, size) + labels.tobytes()
        )


def whole_mnist(folder: Path) -> None:
    """As many pictures as MNIST has."""
    mnist(folder, 60_000)


def pictures(folder: Path, count: int = 128, size: int = 64) -> None:
    """PNG files, all in one folder."""
    from PIL import Image

    folder.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for number in range(count):
        values = draw.integers(0, 256, (size, size, 3), dtype=numpy.uint8)
        Image.fromarray(values).save(folder / f"{number:04d}.png")


def many_pictures(folder: Path) -> None:
    """Twice as many small ones."""
    pictures(folder, 128, 32)


def classes(folder: Path, count: int = 64, size: int = 64) -> None:
    """Pictures in a folder for each of two classes, of train and val, as `ImageFolder` reads them."""
    for part in ("train", "val"):
        for name in ("cats", "dogs"):
            pictures(folder / part / name, count, size)


def masks(folder: Path, count: int = 64, size: int = 64) -> None:
    """Pictures in `imgs`, and for each one of two values in `masks`."""
    from PIL import Image

    pictures(folder / "imgs", count, size)
    (folder / "masks").mkdir()
    draw = numpy.random.default_rng(1)
    for number in range(count):
        values = draw.integers(0, 2, (size, size), dtype=numpy.uint8)
        Image.fromarray(values).save(folder / "masks" / f"{number:04d}.png")


def characters(folder: Path, length: int = 50_000) -> None:
    """Text by characters: `train.bin` and `val.bin` of 16-bit numbers, and `meta.pkl`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    for part in ("train", "val"):
        draw.integers(0, 65, length, dtype=numpy.uint16).tofile(folder / f"{part}.bin")
    names = [chr(48 + number) for number in range(65)]
    meta = {
        "vocab_size": 65,
        "itos": dict(enumerate(names)),
        "stoi": {name: number for number, name in enumerate(names)},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def shards(folder: Path, length: int = 50_000) -> None:
    """Text by characters in two files of 16-bit numbers; the first is for validation."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    for number in range(2):
        draw.integers(0, 65, length, dtype=numpy.uint16).tofile(folder / f"data{number:02d}.bin")


def words(folder: Path, lines: int = 3000) -> None:
    """`train.txt`, `valid.txt` and `test.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, share in (("train", 1), ("valid", 10), ("test", 10)):
        (folder / f"{part}.txt").write_text("\n".join(sentences(lines // share)) + "\n")


def text(file: Path, lines: int = 4000) -> None:
    """One file of sentences, and of each letter."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(sentences(lines)) + f"\n{string.ascii_letters} .,;:!?'-\n")


def enwik8(file: Path, length: int = 95_000_000) -> None:
    """A gzip file with as many bytes as its readers take, which packs to very little."""
    file.parent.mkdir(parents=True, exist_ok=True)
    block = ("\n".join(sentences(2000)) + "\n").encode()
    with gzip.open(file, "wb", compresslevel=1) as packed:
        for _ in range(length // len(block) + 1):
            packed.write(block)


def text_lines(file: Path, count: int = 512) -> None:
    """JSON lines with a `text` each."""
    _lines(file, [{"text": " ".join(sentences(6, number))} for number in range(count)])


def conversations(file: Path, count: int = 512) -> None:
    """JSON lines of a question and an answer each."""
    _lines(
        file,
        [
            {
                "conversations": [
                    {"role": "user", "content": sentences(1, number)[0]},
                    {"role": "assistant", "content": " ".join(sentences(4, number + 1))},
                ]
            }
            for number in range(count)
        ],
    )


def _lines(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def cora(folder: Path, nodes: int = 600, features: int = 400) -> None:
    """A citation graph: `cora.content` and `cora.cites`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows = [
        "\t".join(
            [str(n), *(str(int(draw.random() < 0.02)) for _ in range(features)), f"class_{n % 7}"]
        )
        for n in range(nodes)
    ]
    (folder / "cora.content").write_text("\n".join(rows) + "\n")
    edges = [f"{draw.randrange(nodes)}\t{draw.randrange(nodes)}" for _ in range(4 * nodes)]
    (folder / "cora.cites").write_text("\n".join(edges) + "\n")


def sines(file: Path, rows: int = 20, length: int = 200) -> None:
    """Sines of random phase, as `torch.save` writes an array."""
    import torch

    phases = numpy.random.default_rng(2).integers(-400, 400, (rows, 1))
    torch.save(numpy.sin((numpy.arange(length) + phases) / 20.0), file)


GENERATORS: dict[str, Callable[[Path], None]] = {
    "mnist": mnist,
    "whole_mnist": whole_mnist,
    "pictures": pictures,
    "many_pictures": many_pictures,
    "classes": classes,
    "masks": masks,
    "characters": characters,
    "shards": shards,
    "words": words,
    "text": text,
    "enwik8": enwik8,
    "text_lines": text_lines,
    "conversations": conversations,
    "cora": cora,
    "sines": sines,
}
