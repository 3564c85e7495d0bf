"""What holds for the code as a whole: sizes, discovery by file, documentation, what an import costs."""

import ast
import functools
import inspect
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest

import torchtrim
from torchtrim.cli.main import torchtrim as command_line
from torchtrim.executor.registry import names, technique
from torchtrim.rewriter.fix import Fix, all_fixes, fixes_of
from torchtrim.rules.registry import all_rules

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/torchtrim"
CODE = [
    path
    for top in ("src", "tests", "bench", "examples")
    for path in sorted((ROOT / top).rglob("*.py"))
]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MOST_LINES, MOST_FUNCTION_LINES, MOST_MEDIAN_LINES = 500, 60, 15
MOST_LINES_WITH_A_CLASS = 800
"""For a file with a class of at least a third of its lines: dividing the file would divide one topic."""
RUNS_WHAT_IT_READS = {
    *("pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"),
    *("eval", "exec", "compile", "__import__", "torch.load"),
}
RUNS_THE_SCRIPT = "torchtrim.capture.probes"
HEAVY = {"torch", "rich", "numpy", "jinja2"}
BESIDE = (
    "torchtrim.memory.packing",
    "torchtrim.attention",
    "torchtrim.syncs",
    "torchtrim.costs",
    "torchtrim.stream",
)
BESIDE_THE_SCRIPT = (
    *(
        "dispatch",
        "emulator",
        "dryrun",
        "capture",
        "executor",
        "techniques",
        "planner",
        "pipelines",
    ),
    *("evidence", "runner", "certify", "workflows"),
)
FLOATS = {"empty", "empty_strided", "zeros", "ones", "full", "eye", "linspace", "rand", "randn"}
FACTORIES = FLOATS | {
    "tensor",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "arange",
    "randint",
    "randperm",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parsed() -> tuple[tuple[str, ast.Module], ...]:
    """Every module of the package, and its dotted name."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


@functools.cache
def calls() -> tuple[tuple[str, str], ...]:
    """Each call of the package: the module, and what it calls."""
    return tuple(
        (module, ast.unparse(node.func))
        for module, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    )


def functions() -> Iterator[tuple[str, Function]]:
    """Every function of the package, and where it is."""
    for name, module in parsed():
        for node in ast.walk(module):
            if isinstance(node, Function):
                yield f"{name}.{node.name}", node


def made_by_default() -> Iterator[str]:
    """Calls that make a tensor on the default device, or of the default type: the script may set either."""
    for module, tree in parsed():
        if module.split(".")[1:2] not in [[room] for room in BESIDE_THE_SCRIPT]:
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)):
                    named = {one.arg for one in node.keywords}
                    on_meta = any(ast.unparse(one.value) == "'meta'" for one in node.keywords)
                    typed = name not in FLOATS or "dtype" in named or on_meta
                    if name in FACTORIES and not ("device" in named and typed):
                        yield f"{module}:{node.lineno} {ast.unparse(node)}"


def size(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def public(module: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public classes and functions, and public methods that a base does not document."""
    for node in module.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield node.name, node
        bases = [ast.unparse(base) for base in getattr(node, "bases", ())]
        if isinstance(node, ast.ClassDef) and not {"Listener", "Protocol"}.intersection(bases):
            for method in node.body:
                if isinstance(method, Function) and not method.name.startswith("_"):
                    yield f"{node.name}.{method.name}", method


def loaded_after(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after running the code."""
    end = "import sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{end}"], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


def test_only_pipelines_import_the_compiler() -> None:
    """It takes seconds, which every start of a verb would take."""
    stories = (
        path.stem for path in (SOURCE / "workflows").glob("[!_]*.py") if path.stem != "pipeline"
    )
    names = ["runner.worker", "runner.planned_script", "workflows.optimize.report"]
    names += [f"workflows.{story}" for story in stories]
    loaded = loaded_after("import " + ", ".join(f"torchtrim.{name}" for name in names))
    assert "torch" in loaded
    assert not {"torch._dynamo", "torch._inductor"} & loaded


def test_our_own_tensors_name_their_device_and_type() -> None:
    assert list(made_by_default()) == []


def test_no_file_is_long() -> None:
    lines = {str(path): path.read_text(encoding="utf-8") for path in CODE}
    sizes = {path: text.count("\n") for path, text in lines.items()}
    long = {path: size for path, size in sizes.items() if size > MOST_LINES}
    assert {path: size for path, size in long.items() if size > most_lines(lines[path])} == {}


def most_lines(text: str) -> int:
    """Return the most lines that a file may have: more if one class is a third of it."""
    classes = [one for one in ast.parse(text).body if isinstance(one, ast.ClassDef)]
    largest = max((1 + (one.end_lineno or 0) - one.lineno for one in classes), default=0)
    return MOST_LINES_WITH_A_CLASS if 3 * largest >= text.count("\n") else MOST_LINES


def test_functions_are_a_few_lines() -> None:
    sizes = {where: size(function) for where, function in functions()}
    assert {where: s for where, s in sizes.items() if s > MOST_FUNCTION_LINES} == {}
    assert statistics.median(sizes.values()) <= MOST_MEDIAN_LINES


def test_what_is_public_is_documented() -> None:
    bare = [name for name, module in parsed() if module.body and not ast.get_docstring(module)]
    bare += [
        f"{name}.{what}"
        for name, module in parsed()
        for what, node in public(module)
        if not ast.get_docstring(node)
    ]
    assert bare == []


def test_every_function_is_annotated() -> None:
    bare = []
    for where, function in functions():
        args = function.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        named = [a for a in every if a is not None and a.arg not in ("self", "cls")]
        if function.returns is None or any(a.annotation is None for a in named):
            bare.append(where)
    assert bare == []


def test_nothing_runs_what_it_reads() -> None:
    """No pickle and no eval: profiles, traces and plans are not trusted. The script itself is run."""
    found = []
    for name, module in parsed():
        if name == RUNS_THE_SCRIPT:
            continue
        for node in ast.walk(module):
            used = set()
            if isinstance(node, ast.Import):
                used = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call):
                used = {ast.unparse(node.func)}
            found += [f"{name}: {one}" for one in used & RUNS_WHAT_IT_READS]
    assert found == []


def test_every_rule_fix_technique_and_verb_is_found_by_its_file() -> None:
    def files(room: str, defines: str) -> set[str]:
        paths = (SOURCE / room).glob("*.py")
        return {p.stem for p in paths if f"\n{defines}" in p.read_text(encoding="utf-8")}

    def folders(room: str, defines: str) -> set[str]:
        paths = (SOURCE / room).glob(f"*/{room.removesuffix('s')}.py")
        return {p.parent.name for p in paths if f"\n{defines}" in p.read_text(encoding="utf-8")}

    verbs = command_line.list_commands(click.Context(command_line))
    assert {found.stem for found in all_rules()} == files("rules", "RULE = ")
    techniques = "techniques", "TECHNIQUE = "
    assert set(names()) == files(*techniques) | folders(*techniques)
    assert {verb.replace("-", "_") for verb in verbs} == files("cli/verbs", "def command(")
    alone, families = (
        files("fixes", "FIX: Fix = ") | files("fixes", "FIX = "),
        files("fixes", "FIXES"),
    )
    assert not alone & families
    homes = [import_module(f"torchtrim.fixes.{home}") for home in families]
    members = [fix.name for home in homes for fix in fixes_of(home)]
    assert sorted(found.name for found in all_fixes()) == sorted([*alone, *members])
    for home in homes:
        made = [one for one in vars(home).values() if isinstance(one, Fix)]
        own = {one.name for one in made if one.write.__module__ == home.__name__}
        assert own == {fix.name for fix in fixes_of(home)}


@pytest.mark.parametrize("name", names())
def test_a_technique_is_named_after_its_file(name: str) -> None:
    assert technique(name).name == name


@pytest.mark.parametrize("name", torchtrim.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert name in dir(torchtrim)
    assert inspect.getdoc(getattr(torchtrim, name))


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'shrink'"):
        _ = torchtrim.shrink


def test_importing_it_imports_neither_torch_nor_rich() -> None:
    assert not HEAVY & loaded_after("import torchtrim")


def test_help_needs_no_torch() -> None:
    loaded = loaded_after(
        "import contextlib, runpy, sys\n"
        "sys.argv = ['torchtrim', '--help']\n"
        "with contextlib.suppress(SystemExit):\n"
        "    runpy.run_module('torchtrim', run_name='__main__')"
    )
    assert "torchtrim.cli.verbs.optimize" in loaded
    assert not HEAVY & loaded


def test_what_only_reads_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mask = scores > 0\nprint(mask.sum().item())\n")
    (tmp_path / "buffers.csv").write_text("id,lower,upper,size\na,0,2,8\nb,1,3,8\n")
    for words in (["explain", "TT101"], ["lint", "train.py"], ["pack", "buffers.csv"]):
        loaded = loaded_after(
            "import contextlib, os, runpy, sys\n"
            f"os.chdir({str(tmp_path)!r})\n"
            f"sys.argv = ['torchtrim', *{words}]\n"
            "with contextlib.suppress(SystemExit):\n"
            "    runpy.run_module('torchtrim', run_name='__main__')"
        )
        assert {"torchtrim.api", f"torchtrim.cli.verbs.{words[0]}"} <= loaded
        assert "torch" not in loaded


def test_rooms_that_work_on_records_need_no_torch() -> None:
    rooms = (
        *("errors", "core", "records", "memory", "syncs", "costs", "step", "analysis", "traces"),
        *("rules", "source", "rewriter", "fixes", "linter"),
        "planner",
        "report",
    )
    wanted = [name for name, _ in parsed() if ".".join(name.split(".")[1:2]) in rooms]
    techniques = (
        "from torchtrim.executor.registry import names, technique\nlist(map(technique, names()))"
    )
    loaded = loaded_after("\n".join([*(f"import {name}" for name in wanted), techniques]))
    assert loaded >= {*wanted, "torchtrim.techniques.recompute.technique"}
    assert "torch" not in loaded


def test_the_version_is_the_same_everywhere() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d\S*)", changes, re.MULTILINE)
    assert newest is not None
    assert PROJECT["version"] == torchtrim.__version__ == newest[1]


def test_every_dependency_is_pinned() -> None:
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = {name.lower(): version for name, version in re.findall(r"^([\w-]+)==(\S+)$", text, re.M)}
    assert {re.split(r"[<>=;]", one)[0] for one in wanted} <= pins.keys()
    assert pins["torch"] == "2.13.0"


def test_links_inside_the_documents_lead_somewhere() -> None:
    dead = [
        f"{path}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert dead == []


def calls_of(name: str) -> set[str]:
    """The modules of the package that call a function or class of this name."""
    return {module for module, called in calls() if called == name}


def test_there_is_one_maker_of_plans() -> None:
    assert calls_of("Plan") == {"torchtrim.planner.plans"}
    makers = {module.rpartition(".")[0] for module in calls_of("build_plan")}
    assert makers == {"torchtrim.planner"}


def test_there_is_one_sum_of_bytes() -> None:
    """Whoever adds up what is alive over time calls it; the others that run a sum over bytes are few."""
    summing = {m.rpartition(".")[0] for m in calls_of("bytes_over_time")}
    assert {"torchtrim.analysis", "torchtrim.memory", "torchtrim.step"} <= summing
    allowed = {
        "torchtrim.analysis.timeline",  # Of seconds: where each operator ends on a chart.
        "torchtrim.report.folds",  # Of seconds: what charts leave out.
        "torchtrim.memory.packing.buffers",
        "torchtrim.memory.network",
        "torchtrim.capture.allocator",
        "torchtrim.step.incremental",
        "torchtrim.step.index",  # Of passes of backward: which one a task is in.
        "torchtrim.techniques.recompute.technique",
    }
    assert {m for m in calls_of("accumulate") if not m.startswith(BESIDE)} <= allowed


def test_there_is_one_simulator() -> None:
    """Techniques, rules and the planner say what they change as edits, and none adds them up itself."""
    simulating = calls_of("simulate") | calls_of("Simulation")
    assert "torchtrim.planner.problem" in simulating
    assert "torchtrim.rules.tt203_recomputable_activations" in simulating
    for module, tree in parsed():
        names_ = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        if not module.startswith("torchtrim.step"):
            assert names_.isdisjoint({"simulate", "Simulation", "Simulator"}), module
