"""Small generated data that is no folder of pictures: words, tokens, flows, points, hours, boxes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy


def many_words(folder: Path, lines: int = 4000, known: int = 2000) -> None:
    """`train.txt`, `valid.txt` and `test.txt`, out of more words than a tiny corpus has."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    for part, share in (("train", 1), ("valid", 20), ("test", 20)):
        drawn = draw.zipf(1.3, (lines // share, 20)) % known
        drawn[:100] = numpy.arange(2000).reshape(100, 20) % known
        (folder / f"{part}.txt").write_text("\n".join(_line(row) for row in drawn) + "\n")


def pairs_of_sentences(file: Path, lines: int = 1500) -> None:
    """Two sentences a line, with a tabulator between them."""
    draw = numpy.random.default_rng(0)
    drawn = draw.zipf(1.3, (lines, 2, 24)) % 2000
    file.write_text("".join(f"{_line(one)}\t{_line(other)}\n" for one, other in drawn))


def _line(numbers: numpy.ndarray) -> str:
    return " ".join(f"w{number}" for number in numbers)


def fineweb(folder: Path, length: int = 50_000) -> None:
    """Tokens of 16 bits after a header of 256 numbers, for training and for validation."""
    folder.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for part in ("train", "val"):
        header = numpy.zeros(256, dtype=numpy.int32)
        header[:3] = 20240520, 1, length
        tokens = draw.integers(0, 512, length, dtype=numpy.uint16)
        name = f"fineweb_{part}_000001.bin"
        (folder / name).write_bytes(header.tobytes() + tokens.tobytes())


def flying_chairs(folder: Path, count: int = 64, wide: int = 256, high: int = 192) -> None:
    """Two pictures and the flow between them, by number."""
    from PIL import Image

    folder.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for number in range(1, count + 1):
        for one in (1, 2):
            values = draw.integers(0, 256, (high, wide, 3), dtype=numpy.uint8)
            Image.fromarray(values).save(folder / f"{number:05d}_img{one}.ppm")
        flow = draw.normal(0, 4, (high, wide, 2)).astype(numpy.float32)
        head = b"PIEH" + numpy.array([wide, high], dtype=numpy.int32).tobytes()
        (folder / f"{number:05d}_flow.flo").write_bytes(head + flow.tobytes())


def modelnet(folder: Path, points: int = 300) -> None:
    """Points with their normals, a file a shape, of ten classes."""
    draw = numpy.random.default_rng(0)
    names = [f"thing{number}" for number in range(10)]
    shapes: dict[str, list[str]] = {"train": [], "test": []}
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(30):
            shape = f"{name}_{number:04d}"
            shapes["train" if number < 24 else "test"].append(shape)
            values = draw.normal(size=(points, 6))
            numpy.savetxt(folder / name / f"{shape}.txt", values, delimiter=",", fmt="%.4f")
    (folder / "modelnet10_shape_names.txt").write_text("\n".join(names))
    for part, own in shapes.items():
        (folder / f"modelnet10_{part}.txt").write_text("\n".join(own))


def hourly(file: Path, hours: int = 14_500) -> None:
    """Seven series by the hour, as the transformer temperatures that forecasters compare on."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    begin, phases = datetime(2016, 7, 1), draw.uniform(0, 6, 7)
    values = numpy.sin(numpy.arange(hours)[:, None] / 24 + phases) + draw.normal(0, 0.1, (hours, 7))
    lines = ["date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"]
    for hour, row in enumerate(values):
        lines.append(",".join([str(begin + timedelta(hours=hour)), *(f"{one:.4f}" for one in row)]))
    file.write_text("\n".join(lines) + "\n")


def boxes(folder: Path, count: int = 96, size: int = 96) -> None:
    """Pictures, for each a file of boxes with their classes, and a file that lists the pictures."""
    from PIL import Image

    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for number in range(count):
        values = draw.integers(0, 256, (size, size, 3), dtype=numpy.uint8)
        Image.fromarray(values).save(folder / "images" / f"{number:04d}.jpg")
        rows = draw.uniform(0.3, 0.6, (3, 4))
        text = "".join(
            f"{kind} {' '.join(f'{one:.3f}' for one in row)}\n" for kind, row in enumerate(rows)
        )
        (folder / "labels" / f"{number:04d}.txt").write_text(text)
    listed = (f"{folder.name}/images/{number:04d}.jpg\n" for number in range(count))
    (folder / "train.txt").write_text("".join(listed))


def modelnet_h5(folder: Path) -> None:
    """Points and their classes in two files."""
    folder.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for part, count in (("train", 320), ("test", 32)):
        labels = draw.integers(0, 40, (count, 1), dtype=numpy.uint8)
        _h5(folder / f"ply_data_{part}0.h5", data=draw.normal(size=(count, 2048, 3)), label=labels)


def patches_h5(file: Path, count: int = 120, size: int = 41) -> None:
    """Patches of pictures, and what they should become."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    _h5(file, **{name: draw.uniform(size=(count, 1, size, size)) for name in ("data", "label")})


def _h5(file: Path, **arrays: numpy.ndarray) -> None:
    import h5py

    with h5py.File(file, "w") as opened:
        for name, values in arrays.items():
            opened[name] = values.astype(numpy.float32) if values.dtype.kind == "f" else values


OTHERS: dict[str, Callable[[Path], None]] = {
    "many_words": many_words,
    "pairs_of_sentences": pairs_of_sentences,
    "fineweb": fineweb,
    "flying_chairs": flying_chairs,
    "modelnet": modelnet,
    "hourly": hourly,
    "boxes": boxes,
    "modelnet_h5": modelnet_h5,
    "patches_h5": patches_h5,
}
