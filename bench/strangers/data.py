"""Small generated data in the layouts that public programs read: pictures, text, graphs. All is seeded."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import string
import struct
from collections.abc import Callable
from pathlib import Path

import numpy

from bench.strangers.other_data import OTHERS

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


def fashion_mnist(folder: Path) -> None:
    """As many pictures in the folder that `torchvision.datasets.FashionMNIST` reads."""
    mnist(folder)
    (folder / "MNIST").rename(folder / "FashionMNIST")


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


def photographs(folder: Path, count: int = 96, wide: int = 2048, high: int = 1536) -> None:
    """JPEG files as a camera's, large and noisy, in a folder for each of two classes of train and val."""
    kinds = [_photograph(seed, wide, high) for seed in range(8)]
    for part, share in (("train", 1), ("val", 10)):
        for name in ("cats", "dogs"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count // share):
                (folder / part / name / f"{number:04d}.jpg").write_bytes(kinds[number % len(kinds)])


def _photograph(seed: int, wide: int, high: int) -> bytes:
    from PIL import Image

    draw = numpy.random.default_rng(seed)
    smooth = draw.integers(0, 256, (high // 16, wide // 16, 3), dtype=numpy.uint8)
    values = numpy.asarray(Image.fromarray(smooth).resize((wide, high)), dtype=numpy.int16)
    noisy = values + draw.integers(-12, 13, values.shape, dtype=numpy.int16)
    packed = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(numpy.uint8)).save(packed, "JPEG", quality=90)
    return packed.getvalue()


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


def cifar10(folder: Path) -> None:
    """Five files of training pictures and one of others, as `torchvision.datasets.CIFAR10` reads them."""
    named = folder / "cifar-10-batches-py"
    names = [f"class {number}" for number in range(10)]
    for part in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"):
        _small_pictures(named / part, "labels", 512, len(names))
    _small_pictures(named / "test_batch", "labels", 256, len(names))
    (named / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))


def cifar100(folder: Path) -> None:
    """As `torchvision.datasets.CIFAR100` reads them."""
    named = folder / "cifar-100-python"
    names = [f"class {number}" for number in range(100)]
    _small_pictures(named / "train", "fine_labels", 1024, len(names))
    _small_pictures(named / "test", "fine_labels", 256, len(names))
    (named / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))


def _small_pictures(file: Path, labels: str, count: int, classes: int) -> None:
    """Pictures of 32 by 32 pixels and their classes, pickled."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    values = draw.integers(0, 256, (count, 3 * 32 * 32), dtype=numpy.uint8)
    chosen = [int(one) for one in draw.integers(0, classes, count)]
    file.write_bytes(pickle.dumps({"data": values, labels: chosen}))


def bsds(folder: Path) -> None:
    """Pictures in `train` and `test`, large enough to cut 256 pixels out."""
    for part in ("train", "test"):
        pictures(folder / part, 48, 272)


def pets(folder: Path) -> None:
    """JPEG files whose names say what is on them."""
    from PIL import Image

    folder.mkdir(parents=True)
    draw = numpy.random.default_rng(0)
    for number in range(256):
        values = draw.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
        name = ("cat", "dog")[number % 2]
        Image.fromarray(values).save(folder / f"{name}_{number}.jpg")


def mnist_tensors(folder: Path, count: int = 2048) -> None:
    """Normalized pictures and their classes as `torch.save` writes tensors, for training and for tests."""
    import torch

    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    for part, size in (("train", count), ("test", count // 2)):
        torch.save(torch.randn(size, 1, 28, 28, generator=draw), folder / f"{part}_data.pt")
        chosen = torch.randint(0, 10, (size,), generator=draw)
        torch.save(chosen, folder / f"{part}_labels.pt")


def springs(folder: Path, count: int = 256, length: int = 98) -> None:
    """Places and speeds of five points in the plane, and which of them are joined, of three parts."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    for part in ("train", "valid", "test"):
        long = length if part == "test" else length // 2
        for name in ("loc", "vel"):
            numpy.save(
                folder / f"{name}_{part}_springs5.npy", draw.normal(size=(count, long, 2, 5))
            )
        numpy.save(
            folder / f"edges_{part}_springs5.npy", draw.integers(0, 2, (count, 5, 5)) * 2 - 1
        )


def several_texts(folder: Path) -> None:
    """Text files of sentences."""
    for number in range(4):
        text(folder / f"{number}.txt", 800)


def preferences(file: Path, count: int = 512) -> None:
    """JSON lines of a question, a better answer and a worse one."""
    answers = [" ".join(sentences(3, number)) for number in range(count + 1)]
    rows = [
        {
            "prompt": sentences(1, number)[0],
            "chosen": answers[number],
            "rejected": answers[number + 1],
        }
        for number in range(count)
    ]
    _lines(file, [dict(row) for row in rows])


def small_gpt2(folder: Path) -> None:
    """A GPT-2 of four layers with random weights, and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    names = ["<eos>", "<unk>", *WORDS, *string.ascii_letters, *" .,;:!?'-\n"]
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        bos_token="<eos>",
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(known),
        n_positions=128,
        n_embd=64,
        n_layer=4,
        n_head=4,
        eos_token_id=0,
        bos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


def small_pythia(file: Path) -> None:
    """The configuration of a GPT-NeoX of four layers."""
    file.write_text(
        "name: small\nblock_size: 64\nvocab_size: 128\npadded_vocab_size: 128\n"
        "n_layer: 4\nn_head: 4\nn_embd: 64\n"
    )


def small_unet(folder: Path) -> None:
    """The configuration of a U-Net of two levels, as diffusers reads it."""
    folder.mkdir(parents=True)
    settings: dict[str, object] = {
        "_class_name": "UNet2DModel",
        "sample_size": 32,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": [32, 64],
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    }
    (folder / "config.json").write_text(json.dumps(settings))


GENERATORS: dict[str, Callable[[Path], None]] = {
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "whole_mnist": whole_mnist,
    "pictures": pictures,
    "many_pictures": many_pictures,
    "classes": classes,
    "masks": masks,
    "photographs": photographs,
    "characters": characters,
    "shards": shards,
    "words": words,
    "text": text,
    "enwik8": enwik8,
    "text_lines": text_lines,
    "conversations": conversations,
    "cora": cora,
    "sines": sines,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "bsds": bsds,
    "pets": pets,
    "mnist_tensors": mnist_tensors,
    "springs": springs,
    "several_texts": several_texts,
    "preferences": preferences,
    "small_gpt2": small_gpt2,
    "small_pythia": small_pythia,
    "small_unet": small_unet,
    **OTHERS,
}
