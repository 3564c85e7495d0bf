"""What torchtrim says, frozen: one file a case, so that `diff -r A B` shows what a change of code changed.

    python -m bench.frozen DIR [NAME...]

Each case is the command line in a new process, in a folder with copies of the examples and of what tests
and benchmarks run. A file is what it printed, its errors and its exit code; the files it wrote are beside it.
What differs between two runs of one tree is replaced by `~`: seconds, memory of processes, paths. A name
takes the cases that begin with it, and those that they need.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = {
    "corpus": "tests/cases/corpus",
    "examples": "examples",
    "faulty": "tests/cases/faulty",
    "late": "bench/late",
    "scripts": "tests/scripts",
    "traces": "tests/data/traces",
}
PAGES = {"rules": "rules.pages", "fixes.md": "rewriter.pages", "waits.md": "syncs.pages"}
PUBLIC = ("torchtrim", "torchtrim.attention", "torchtrim.stream", "torchtrim.errors")
TECHNIQUES = (
    "recompute replay overwrite split_channels plain_optimizer optimizer_in_backward "
    "offload_activations offload_optimizer data_parallel shard chunked_loss micro_batch "
    "split_matmul split_time relative_attention precision replace_norm scale_lr low_bit_states "
    "compress_gradients"
)
GIVEN = {
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
}
VERBS = (
    "compare diagnose doctor estimate explain export lint optimize pack plan run stream-check "
    "trace tune-loader undo verify"
)
LIMIT_SECONDS = 300
NARROW, WIDE = 100, 400  # what is measured is not to break in another place
WAITS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    inputs = torch.randn(4, 8).to("cuda")
    outputs = model(inputs)
    outputs[outputs > 1] = 0.5
    loss = outputs[outputs > 0].sum() + outputs.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


class Case(NamedTuple):
    """One command; of the files it writes, those kept; whether what it says is measured; what it needs."""

    name: str
    words: str
    kept: str = ""
    measured: bool = True
    needs: str = ""
    out: bool = True


def exact(name: str, words: str, kept: str = "", needs: str = "") -> Case:
    """A case in which nothing is measured, so that nothing but paths is replaced."""
    return Case(name, words, kept, measured=False, needs=needs, out=False)


SMALL = "-- --batch-size 4 --context 32"
REPORT = "report.json profile.json"
PLANNED = f"{REPORT} plan.toml"
RECORDED = [
    Case("diagnose-plain", "diagnose scripts/plain.py --device cpu --json", "profile.json"),
    Case("diagnose-gan", "diagnose scripts/gan.py -v", REPORT),
    Case("diagnose-staged", "diagnose scripts/staged.py --format markdown", REPORT),
    Case("diagnose-compiled", "diagnose scripts/unusual.py compiled", REPORT),
    Case("diagnose-calls", "diagnose scripts/unusual.py calls", REPORT),
    Case("diagnose-capture", "diagnose scripts/captured.py --device emulated --capture", REPORT),
    Case("diagnose-logits", "diagnose scripts/keeps.py --format sarif logits", REPORT),
    Case("diagnose-graph", "diagnose scripts/keeps.py --format github graph", REPORT),
    Case("diagnose-evaluation", "diagnose scripts/keeps.py -q evaluation", REPORT),
    Case("diagnose-average", "diagnose scripts/keeps.py average", REPORT),
    Case(
        "diagnose-waits",
        "diagnose examples/segmentation.py --device a10g --format sarif -- --batch-size 2",
        REPORT,
    ),
    Case("diagnose-ranks", "diagnose scripts/replicated.py --processes 2 --json"),
    Case("diagnose-spare", "diagnose scripts/ranks.py --processes 2 --json -- --find-unused"),
    Case("diagnose-crash", "diagnose scripts/faults.py crash-in-step"),
    Case("diagnose-early", "diagnose scripts/faults.py early"),
    Case(
        "estimate-charlm",
        f"estimate examples/charlm.py --device a10g --fits 80GiB {SMALL}",
        REPORT,
    ),
    Case("estimate-gan", "estimate examples/gan.py -- --batch-size 4", REPORT),
    Case("estimate-fsdp", f"estimate examples/charlm.py --ranks 8 --fsdp {SMALL}", REPORT),
    Case("estimate-sharded", "estimate scripts/sharded.py --ranks 8", REPORT),
    Case("plan-charlm", f"plan examples/charlm.py --device cpu --memory 1% {SMALL}"),
    Case("plan-gan", "plan scripts/gan.py --memory 80%"),
    Case("plan-batch", "plan scripts/plain.py --find-batch --memory 1MiB", "report.json"),
    Case(
        "plan-export",
        "plan scripts/staged.py --memory 129748 --export python --frontier",
        f"{PLANNED} planned.py",
    ),
    Case(
        "plan-resnet",
        "plan examples/resnet.py --device cpu --memory 70% -- --batch-size 4",
        PLANNED,
    ),
    Case("optimize-calls", "optimize scripts/calls.py --mode inference plain", PLANNED),
    Case("optimize-missed", "optimize scripts/staged.py --memory 10% --json", PLANNED),
    Case(
        "optimize-rounding", "optimize scripts/staged.py --memory 120564 --allow rounding", PLANNED
    ),
    Case("optimize-fixes", "optimize waits.py --device emulated --json", "report.json fixes.diff"),
    Case(
        "verify-plan",
        "verify scripts/staged.py --plan out/plan-export/plan.toml",
        "report.json certificate.json report.html",
        needs="plan-export",
    ),
    Case(
        "verify-replay",
        "verify examples/resnet.py --device cpu --plan out/plan-resnet/plan.toml -- --batch-size 4",
        "report.json certificate.json",
        needs="plan-resnet",
    ),
    Case(
        "verify-pair",
        "verify --json scripts/staged.py scripts/gan.py",
        "report.json certificate.json",
    ),
    Case(
        "verify-check",
        "verify --check out/verify-plan/certificate.json",
        "report.json certificate.json",
        needs="verify-plan",
    ),
    Case("verify-declared", "verify --stream scripts/streams.py declared", "report.json"),
    Case("stream-check-all", "stream-check scripts/streams.py all", REPORT),
    Case("stream-check-declared", "stream-check scripts/streams.py declared", REPORT),
    Case("stream-check-none", "stream-check scripts/streams.py none"),
    Case("tune-loader-slow", "tune-loader scripts/slow_loader.py --seconds 5 --json", out=False),
    Case(
        "run-plan",
        "run scripts/staged.py --plan out/plan-export/plan.toml",
        needs="plan-export",
        out=False,
    ),
    Case("doctor", "doctor --json", out=False),
    Case(
        "pack-few",
        "pack few.csv --json --out few.out.csv --svg few.svg",
        "few.out.csv few.svg",
        out=False,
    ),
    Case("pack-many", "pack many.csv --alignment 64 --out many.out.csv", "many.out.csv", out=False),
]
LIBRARIES = " ".join(f"{sysconfig.get_path('purelib')}/torch/{name}" for name in ("nn", "optim"))
OURS = "corpus examples faulty late scripts waits.py"
LINT = "lint --no-cache --format"
TIMED = "times/diagnose-logits.json times/diagnose-graph.json"
BOTH = "diagnose-logits diagnose-graph"
PERFETTO = "staged.perfetto.json"
RANK = "traces/hta__alexnet.json.gz"
READ = [
    exact("lint-libraries", f"{LINT} sarif {LIBRARIES}"),
    exact("lint-ours", f"{LINT} json {OURS}"),
    exact("lint-full", f"{LINT} full {OURS}"),
    exact("lint-concise", f"{LINT} concise --select TT101,TT103 {OURS}"),
    exact("lint-github", f"{LINT} github examples"),
    exact("lint-diff", f"lint --no-cache --diff {OURS}"),
    exact("lint-unsafe-diff", f"lint --no-cache --unsafe-fixes --diff {OURS}"),
    exact("lint-unreadable", f"{LINT} full traces/README.md nowhere.py"),
    exact("trace-rank", f"trace {RANK}"),
    exact("trace-folder", "trace traces --top 50"),
    exact("compare-markdown", f"compare {TIMED} --format markdown", needs=BOTH),
    exact("compare-profiles", f"compare {TIMED} --json --fail-on 5%", needs=BOTH),
    exact("compare-text", f"compare {TIMED}", needs=BOTH),
    exact(
        "export-staged",
        f"export times/diagnose-staged.json --perfetto {PERFETTO}",
        PERFETTO,
        "diagnose-staged",
    ),
    exact("pack-wrong", "pack wrong.csv"),
    exact("explain", "explain --json"),
    exact("explain-nothing", "explain NOTHING"),
    *(exact(f"explain-{name}", f"explain {name}") for name in ("TT203", *TECHNIQUES.split())),
    exact("version", "--version"),
    exact("help", "--help"),
    *(exact(f"help-{verb}", f"{verb} --help") for verb in VERBS.split()),
]
TRACES = sorted(path.name for path in (ROOT / COPIED["traces"]).glob("*.json.gz"))
READ += [exact(f"trace-{name.split('.')[0]}", f"trace traces/{name} --json") for name in TRACES]
CASES = [*RECORDED, *READ]

_SECONDS = re.compile(r" *(?<![\w.])-?\d+(\.\d+)?(e-?\d+)? (ns|us|ms|s|min|h)\b *")
_SHARE = re.compile(r" *[-+]?\d+(\.\d+)?\s?%")
_SPREAD = re.compile(r"\(([a-z ]*,)? ~ % ?(\+-|±) ~ %\)")
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
_OF_TIME = re.compile(r"(Time of a step|measured).*")
_UNORDERED = re.compile(r'(<path class="m-\d" d="~"/>)+')
_TIMELINE = re.compile(r'(id="timeline-data">).*?(</script>)')
_GROWTH = re.compile(r"(the process grew by ).*( a frame)")
_PROGRESS = re.compile(r"^\d\d:\d\d:\d\d .*\n", re.MULTILINE)
_TOML = re.compile(r"^(\w*seconds|gap) = .*$", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_MODULE = re.compile(r"\btorchtrim(\.\w+)+\.(?=[A-Z_])")
_DECIMAL = re.compile(r"\d+\.\d+(?! ?([KMGT]i)?B\b)|\b\d+(?=px|%)")
_DRAWN = re.compile(r'(\b(?:d|x|y|x1|x2|y1|y2|cx|width|height|points|transform)=")[^"]*"')
_TIMES = re.compile(
    r"(\w*_)?(seconds|ms|spread|clock|gap|rss)|rss_bytes|busy|free_bytes|start|process_growth_bytes"
)
LEFT_OUT = {"TT301", "TT601", "TT602", "TT606"}  # they come and go with the times


def main() -> None:
    """Run the cases that are asked for, and say how long each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME", help="all cases by default")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder} is there already")
    sys.path.insert(0, str(ROOT / "src"))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="frozen-") as name:
        freeze(Path(name).resolve(), options.folder, list(wanted(tuple(options.names))))
    print(f"{time.perf_counter() - begin:.0f} s in all", file=sys.stderr)


def wanted(names: tuple[str, ...]) -> Iterator[Case]:
    """The cases of these names, each after those that it needs; all of them where there is no name."""
    asked = {case.name for case in CASES if not names or case.name.startswith(names)}
    for case in reversed(CASES):
        asked |= set(case.needs.split()) if case.name in asked else set()
    return (case for case in CASES if case.name in asked)


def freeze(work: Path, folder: Path, cases: list[Case]) -> None:
    """Write what each case gives, what Python sees, and the pages."""
    folder.mkdir(parents=True)
    prepare(work)
    for case in cases:
        begin = time.perf_counter()
        run(case, work, folder)
        print(f"{case.name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    for name in PUBLIC:
        (folder / f"python-{name}.txt").write_text("".join(public(name)))
    for name, module in PAGES.items():
        started(["-m", f"torchtrim.{module}", str((folder / f"pages-{name}").resolve())], work)


def prepare(work: Path) -> None:
    """Put into the folder what the commands read."""
    for name, source in COPIED.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / source, work / name, ignore=ignored)
    (work / "pyproject.toml").touch()
    (work / "times").mkdir()
    (work / "waits.py").write_text(WAITS)
    (work / "few.csv").write_text(buffers(12, True))
    (work / "many.csv").write_text(buffers(200, False))
    (work / "wrong.csv").write_text("id,lower,upper,size\n1,0,2,4k\n")


def buffers(count: int, aligned: bool) -> str:
    """A table of buffers for `pack`, the same each time."""
    draw = random.Random(count)
    rows = ["id,lower,upper,size" + ",alignment" * aligned]
    for number in range(count):
        lower = draw.randrange(count)
        upper = lower + draw.randrange(1, count // 3)
        row = [number, lower, upper, draw.randrange(1, 4096)]
        rows.append(",".join(map(str, [*row, 64] if aligned else row)))
    return "\n".join(rows) + "\n"


def started(words: list[str], work: Path, width: int = NARROW) -> subprocess.CompletedProcess[str]:
    """Python in a new process, in the folder, as in a terminal of that width."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=work,
        env={**os.environ, **GIVEN, "COLUMNS": str(width)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def run(case: Case, work: Path, folder: Path) -> None:
    """Write what a command prints, its errors, its exit code, and the files that are kept."""
    verb, *rest = case.words.split()
    out = work / "out" / case.name if case.out else work
    given = ["--out", f"out/{case.name}"] if case.out else []
    words = ["-m", "torchtrim", verb, *given, *rest]
    done = started(words, work, WIDE if case.measured else NARROW)
    printed = _document(done.stdout, case, work)
    errors = _text(_PROGRESS.sub("", done.stderr), case, work)
    ended = f"{printed}\n-- errors\n{errors}\n-- exit code {done.returncode}\n"
    (folder / f"{case.name}.txt").write_text(ended)
    for name in case.kept.split():
        (folder / f"{case.name}.{name}").write_text(_file(out / name, case, work))
    if (profile := out / "profile.json").exists() and case.out:
        (work / "times" / f"{case.name}.json").write_text(json.dumps(_timed(profile)))


def _file(path: Path, case: Case, work: Path) -> str:
    """A file that a command wrote; where there is none, that."""
    if not path.exists():
        return "there is no such file\n"
    text = path.read_text()
    if path.suffix == ".html":
        return _page(text, work)
    return _document(text, case, work)


def _document(text: str, case: Case, work: Path) -> str:
    """What a command wrote, with what varies replaced: JSON as JSON, all else as text."""
    if text.startswith(("{", "[")):
        try:
            found = json.loads(text)
        except ValueError:
            return _text(text, case, work)
        if case.measured and "operators" in found:
            return _rows(_profile(found, lambda _row, _column: "~"), work)
        found = _settled(found) if case.measured else found
        return _text(json.dumps(found, indent=1, ensure_ascii=False), case, work)
    return _text(text, case, work)


def _settled(found: Any) -> Any:
    """A document without what was measured. What is modelled stays."""
    if isinstance(found, list):
        return [_settled(one) for one in found if not _is_left_out(one)]
    if not isinstance(found, dict):
        return found
    modelled = found.get("source") == "modelled"
    return {key: _value(key, value, modelled) for key, value in found.items()}


def _is_left_out(one: Any) -> bool:
    return isinstance(one, dict) and not LEFT_OUT.isdisjoint((one.get("code"), one.get("ruleId")))


def _value(key: str, value: Any, modelled: bool) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and _TIMES.fullmatch(key) and not modelled:
        return "~"
    if key == "levers":
        return sorted(_settled(value), key=json.dumps)
    return value if key == "waiting" else _settled(value)


def _profile(found: dict[str, Any], number: Callable[[int, int], Any]) -> dict[str, Any]:
    """A profile with other times, which are its numbers with a point. `loader` is measured as a whole."""
    numbered = {key: _timed_table(value, number) for key, value in found.items()}
    return numbered | {"rss_bytes": None, "loader": None, "recorded_steps": 1}


def _timed_table(value: Any, number: Callable[[int, int], Any]) -> Any:
    if isinstance(value, list):
        return [_timed_row(row, index, number) for index, row in enumerate(value)]
    return _timed_row([value], 0, number)[0]


def _timed_row(row: Any, index: int, number: Callable[[int, int], Any]) -> Any:
    if not isinstance(row, list):
        return row
    times = [column for column, value in enumerate(row) if isinstance(value, float)]
    for position, column in enumerate(times):
        row[column] = number(index, position)
    return [_timed_row(one, 0, number) if isinstance(one, list) else one for one in row]


def _timed(path: Path) -> dict[str, Any]:
    """A recorded profile in which each operator begins a millisecond after the one before and takes half."""
    return _profile(
        json.loads(path.read_text()),
        lambda row, position: 0.0005 if position else row / 1000,
    )


def _rows(found: dict[str, Any], work: Path) -> str:
    """A profile, one row of a table a line, so that a difference is one line."""
    lines = []
    for key, value in found.items():
        several = isinstance(value, list)
        lines += [f"{key} {json.dumps(one)}" for one in (value if several else [value])]
    return _paths("\n".join(lines) + "\n", work)


def _text(text: str, case: Case, work: Path) -> str:
    """Lines with what varies replaced; what is measured too where the case measures."""
    text = _paths(text, work)
    if not case.measured:
        return text
    lines = (_line(line) for line in _TOML.sub(r"\1 = ~", text).splitlines())
    return "\n".join(lines) + "\n"


def _line(line: str) -> str:
    """A line without its times, and without the shares of time that stand beside them."""
    timed = _SECONDS.sub(" ~ s ", _GROWTH.sub(r"\1~\2", line))
    shared = _SPREAD.sub("(~)", _SHARE.sub(" ~ %", timed))
    return _DATE.sub("~", shared if timed != line else line)


def _paths(text: str, work: Path) -> str:
    """Lines without the folders that they name."""
    for path, name in ((work, "<work>"), (sys.prefix, "<venv>"), (ROOT, "<root>")):
        text = text.replace(str(path), name)
    return _ADDRESS.sub("0x~", text)


def _page(text: str, work: Path) -> str:
    """An HTML page without what is drawn to the scale of time; its lines in order where time orders them."""
    text = _TIMELINE.sub(r"\1~\2", _paths(text, work))
    lines = [_drawn(_SHARE.sub(" ~ %", _line(line))) for line in text.splitlines()]
    return "\n".join(sorted(lines)) + "\n"


def _drawn(line: str) -> str:
    numbers = _DECIMAL.sub("~", _DRAWN.sub(r'\1~"', line))
    return _OF_TIME.sub(r"\1 ~", _UNORDERED.sub("<path/>", numbers))


def public(name: str) -> Iterator[str]:
    """Each public name of a module: what it is, its signature, its documentation, its own members."""
    module = importlib.import_module(name)
    for one in sorted(set(dir(module))):
        value = getattr(module, one)
        if not one.startswith("_") and not inspect.ismodule(value):
            yield f"{one}{_signature(value)}\n{_indented(value)}"
            if inspect.isclass(value):
                yield from _members(value)


def _members(value: type) -> Iterator[str]:
    for name, member in sorted(vars(value).items()):
        if not name.startswith("_"):
            yield f"  .{name}{_signature(member)}\n{_indented(member)}"


def _signature(value: Any) -> str:
    """The signature of what can be called, without where its types are at home."""
    try:
        said = str(inspect.signature(value))
    except (TypeError, ValueError):
        said = f": {type(value).__name__}"
    return _MODULE.sub("", _ADDRESS.sub("0x~", said))


def _indented(value: Any) -> str:
    lines = (inspect.getdoc(value) or "").splitlines()
    return "".join(f"    {line}\n" for line in lines)


if __name__ == "__main__":
    main()
