"""Damaged files for everything that reads one: each is read, or refused with an error that teaches.

    python -m bench.fuzz [INPUTS [SEED]]

INPUTS damaged files for each reader (10,000 by default), drawn from SEED. Counted are those that are refused,
those that still read, and what must not be: tracebacks, and files that take over five seconds. What is
read is used as a verb would use it. Each reader is also given paths of what is no regular file: a pipe, a
device without end, a socket, a folder and links to them. All of these are to be refused.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from bench.machine import save
from torchtrim import TrainStep, api
from torchtrim.cli.main import _read_settings
from torchtrim.errors import TorchtrimError
from torchtrim.linter.text import fixed_text, lint_text
from torchtrim.memory.packing.table import read as read_table
from torchtrim.records.allow import Entry, allow_text, load_allow
from torchtrim.records.baseline import load_baseline
from torchtrim.records.certificate import (
    KeptCertificate,
    Program,
    load_certificate,
    save_certificate,
)
from torchtrim.records.comparison import load_report_or_profile
from torchtrim.records.files import load_pins, load_plan, read_bounded, save_plan, save_profile
from torchtrim.records.trial import Request
from torchtrim.report import html
from torchtrim.report.formats.json import render
from torchtrim.workflows.diagnose import diagnose_report
from torchtrim.workflows.optimize.fitting import Fitting

LIMIT_SECONDS = 5.0
MOST_SOURCE_BYTES = 2**22
TRACE = Path(__file__).parents[1] / "tests/data/traces/hta__cuda_event_sync.json.gz"
_NUMBERS = (
    b"-1",
    b"0",
    b"1e999",
    b"9" * 30,
    b"0.5",
    b"NaN",
    b"null",
    b'"1"',
    b"[]",
    b"{}",
    b"true",
)
_PIECES = (
    b"\x00",
    b"\xff\xfe",
    b"\n",
    b'"',
    b"'",
    b",",
    b"[" * 400,
    b"{" * 400,
    b"(" * 400,
    b"\\",
    b"=",
)
_SOURCE = b"""import torch

def loss(x: torch.Tensor, y: torch.Tensor) -> float:
    keep = y != 255
    picked = x[keep]
    for i in range(4):
        if picked.sum() > i:
            picked = picked / picked.max().item()
    counts = [int((y == c).sum()) for c in torch.unique(y)]
    table = torch.tensor(counts).cuda()
    x[0, keep[0]] = 0.5
    return picked.mean().item() + float(table.sum())
"""
_SETTINGS = b'[project]\nname = "x"\n[tool.torchtrim]\nmemory = "60%"\ndevice = "a10g"\nsteps = 3\n'
_TABLE = b"id,lower,upper,size,alignment\n" + b"".join(
    b"%d,%d,%d,%d,%d\n" % (i, i, i + 3, 64 * i + 8, 8) for i in range(12)
)
_BASELINE = b'{"schema_version": 1, "tests": {"tests/a.py::b": {"syncs": 2, "peak_bytes": 4096}}}'


class Reader(NamedTuple):
    """What reads a file of that name, and a file that it reads."""

    file: str
    sound: bytes
    use: Callable[[Path], object]


def readers(folder: Path) -> dict[str, Reader]:
    """Each reader of a user's files, with a sound file of a small step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    work = TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(64, 8))
    fit = Fitting(work, Request(steps=2), lambda _: None).smallest()
    assert fit.original.profile is not None
    assert fit.certificate is not None
    kept = KeptCertificate(
        certificate=fit.certificate, original=Program(target="a.py"), plan=fit.plan
    )
    save_plan(fit.plan, folder / "plan")
    save_profile(fit.original.profile, folder / "profile")
    save_certificate(kept, folder / "certificate")
    report = diagnose_report(work, Request(steps=2)).report
    entry = Entry(
        code="TT101", path="a.py", function="f", line_text="x.item()", count=2, reason="r"
    )
    sound = {name: (folder / name).read_bytes() for name in ("plan", "profile", "certificate")}
    return {
        "plan": Reader("plan.toml", sound["plan"], lambda p: (load_plan(p), load_pins(p))),
        "profile": Reader("profile.json", sound["profile"], api.perfetto_trace),
        "certificate": Reader("certificate.json", sound["certificate"], load_certificate),
        "report": Reader("report.json", render(report), _shown),
        "allow-list": Reader("allow.toml", allow_text([entry]).encode(), load_allow),
        "baseline": Reader("baseline.json", _BASELINE, load_baseline),
        "settings": Reader("pyproject.toml", _SETTINGS, _read_settings),
        "buffers": Reader("buffers.csv", _TABLE, read_table),
        "trace": Reader("trace.json", gzip.decompress(TRACE.read_bytes()), _traced),
        "packed trace": Reader("trace.json.gz", TRACE.read_bytes(), _traced),
        "source": Reader("train.py", _SOURCE, _linted),
    }


def _shown(path: Path) -> None:
    found = load_report_or_profile(path)
    if hasattr(found, "verb"):
        html.render(found, None, None)


def _traced(path: Path) -> None:
    api.diagnose_traces([path])


def _linted(path: Path) -> None:
    text = read_bounded(path, MOST_SOURCE_BYTES).decode(errors="replace")
    lint_text(str(path), text)
    fixed_text(str(path), text)


def damaged(sound: bytes, rng: random.Random) -> bytes:
    """The file with one to four things wrong."""
    data = sound
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_DAMAGES)(data, rng)
    return data


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def _removed(data: bytes, rng: random.Random) -> bytes:
    first = rng.randint(0, len(data))
    return data[:first] + data[first + rng.choice((1, 1, 4, 40)) :]


def _flipped(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def _inserted(data: bytes, rng: random.Random) -> bytes:
    place = rng.randint(0, len(data))
    return data[:place] + rng.choice(_PIECES) + data[place:]


def _doubled(data: bytes, rng: random.Random) -> bytes:
    first, second = sorted(rng.randint(0, len(data)) for _ in range(2))
    return data[:second] + data[first:]


def _other_number(data: bytes, rng: random.Random) -> bytes:
    digits = [i for i, one in enumerate(data) if 48 <= one <= 57]
    if not digits:
        return data
    first = last = rng.choice(digits)
    while last < len(data) and data[last : last + 1].isdigit():
        last += 1
    return data[:first] + rng.choice(_NUMBERS) + data[last:]


_DAMAGES = (_cut, _removed, _flipped, _inserted, _doubled, _other_number, _other_number)


class Ended(NamedTuple):
    """How reading ended: `read`, `refused`, or the name of an exception that nobody was taught by."""

    how: str
    seconds: float


def attempt(reader: Reader, data: bytes, folder: Path) -> Ended:
    """Read one file."""
    path = folder / reader.file
    path.write_bytes(data)
    return attempt_at(reader, path)


def attempt_at(reader: Reader, path: Path) -> Ended:
    """Read what is at a path."""
    begin = time.perf_counter()
    try:
        reader.use(path)
        how = "read"
    except TorchtrimError:
        how = "refused"
    except Exception as error:
        how = f"{type(error).__name__}: {error}"[:200]
    return Ended(how, time.perf_counter() - begin)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "huge file": _huge,
}
"""Makes what is no file, or none that is read, at a path."""


def strange_paths(folder: Path, name: str) -> dict[str, Path]:
    """A path of each kind that is no file to read, and a link to each."""
    found = {}
    for kind, make in NO_FILES.items():
        place = folder / kind.replace(" ", "-")
        (place / "link").mkdir(parents=True)
        make(place / name)
        (place / "link" / name).symlink_to(place / name)
        found |= {kind: place / name, f"link to {kind}": place / "link" / name}
    return found


def strange(reader: Reader, folder: Path) -> dict[str, Any]:
    """What came of the paths that are no files."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        ended = {
            k: attempt_at(reader, p) for k, p in strange_paths(Path(name), reader.file).items()
        }
    wrong = {kind: one.how for kind, one in ended.items() if one.how != "refused"}
    return {"paths": len(ended), "not_refused": wrong}


def fuzzed(reader: Reader, inputs: int, seed: int, folder: Path) -> dict[str, Any]:
    """What came of so many damaged files."""
    rng = random.Random(seed)
    ended = [attempt(reader, damaged(reader.sound, rng), folder) for _ in range(inputs)]
    counted = Counter(one.how for one in ended)
    return {
        "inputs": inputs,
        "read": counted.pop("read", 0),
        "refused": counted.pop("refused", 0),
        "tracebacks": dict(counted),
        "over_5_s": sum(one.seconds > LIMIT_SECONDS for one in ended),
        "slowest_s": round(max(one.seconds for one in ended), 3),
    }


def main() -> None:
    """All readers."""
    inputs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**32)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, reader in readers(folder).items():
            with suppress(KeyboardInterrupt):
                found[kind] = fuzzed(reader, inputs, seed, folder) | strange(reader, folder)
                print(kind, json.dumps(found[kind]), flush=True)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    summary = {
        "inputs": sum(one["inputs"] for one in found.values()),
        "seed": seed,
        "rss_mib": most,
    }
    save("fuzz", {"summary": summary, "readers": msgspec.to_builtins(found)})


if __name__ == "__main__":
    main()
