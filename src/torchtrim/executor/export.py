"""Export a plan as a module of plain PyTorch, without a dependency on torchtrim.

Each technique names the function that does its work. The export copies that function and everything it uses
from torchtrim, statement by statement, so the exported code is the code torchtrim runs.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from torchtrim.errors import ExportFailed
from torchtrim.executor.registry import Exportable, Plain, technique
from torchtrim.records.plan import Plan, Technique

_ALWAYS = (
    Plain("torchtrim.executor.registry", "Handles"),
    Plain("torchtrim.executor.apply", "fingerprint_of"),
)
_ERRORS = "torchtrim.errors"
_HEAD = '''class ApplyFailed(RuntimeError):
    """The plan could not be applied. The model is unchanged."""'''
_TAIL = '''def apply(model: nn.Module, name: str = "", *, check: bool = True) -> Handles:
    """Apply the plan to a live model. `revert()` of the returned handles restores it.

    `name`: the model's name in the plan, by default its class. `check`: verify that the plan was made for
    this model. Raises `ApplyFailed` and leaves the model unchanged.
    """
    name = name or type(model).__name__
    if name not in FINGERPRINTS:
        raise ApplyFailed(f"the plan is for {', '.join(FINGERPRINTS)}, and this is a {name}.")
    if check and fingerprint_of(model) != FINGERPRINTS[name]:
        raise ApplyFailed(f"the plan was made for another {name}. Plan again for this one.")
    applied = Handles()
    try:
        for function, places, options in PLAN:
            own = tuple(at for at in places if at.split(".")[0].split("[")[0] == name)
            if own:
                applied.add(function({name: model}, own, **options))
    except BaseException:
        applied.revert()
        raise
    return applied'''


def exported(plan: Plan, said: str) -> str:
    """Return the module's source, with the docstring `said`. Raises `ExportFailed`."""
    plains = [(one, _plain(one)) for one in plan.techniques]
    bundle = _Bundle()
    for plain in (*_ALWAYS, *(plain for _, plain in plains)):
        bundle.add(*plain)
    calls = [_call(one, plain) for one, plain in plains]
    parts = [
        f'"""{said}"""',
        "from __future__ import annotations",
        "\n".join(bundle.imports()),
        _HEAD,
        *bundle.pieces(),
        f"FINGERPRINTS = {plan.fingerprint!r}\nPLAN = (\n{''.join(calls)})",
        _TAIL,
    ]
    return "\n\n\n".join(parts) + "\n"


def _call(one: Technique, plain: Plain) -> str:
    places = "".join(f"            {where!r},\n" for where in one.where)
    lines = ("    (", f"        {plain.function},", f"        (\n{places}        ),")
    return "\n".join((*lines, f"        {one.options!r},", "    ),", ""))


def _plain(one: Technique) -> Plain:
    unit = technique(one.name)
    if not isinstance(unit, Exportable):
        raise ExportFailed(
            f"{one.name} cannot be exported, and the plan uses it at {', '.join(one.where)}. Nothing was "
            "written. Run the plan itself: torchtrim run SCRIPT --plan."
        )
    return unit.export()


class _Piece(NamedTuple):
    """A statement with the comments before it, the names it defines and the names it uses."""

    text: str
    makes: frozenset[str]
    uses: frozenset[str]


class _File:
    """A source file: its pieces, and its imports by the name they bind."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.pieces: list[_Piece] = []
        self.outside: dict[str, tuple[str, str]] = {}
        self.inside: dict[str, str] = {}
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        self._lines = text.splitlines()
        self._done = 0
        for number, node in enumerate(ast.parse(text).body):
            self._read(node, is_title=number == 0)
            self._done = node.end_lineno or 0

    def _read(self, node: ast.stmt, *, is_title: bool) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
            return
        text = "\n".join(self._lines[self._done : node.end_lineno]).strip("\n")
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in node.body:
                if isinstance(inner, (ast.Import, ast.ImportFrom)):
                    self._import(inner)
        elif not isinstance(node, ast.Expr):
            uses = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            makes = frozenset(_made(node))
            self.pieces.append(_Piece(text, makes, frozenset(uses - makes)))
        elif not is_title:
            last = self.pieces.pop()
            self.pieces.append(last._replace(text=f"{last.text}\n{text}"))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        home = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if home.startswith("torchtrim"):
                self.inside[name] = home
            elif home != "__future__":
                named = ast.unparse(ast.alias(alias.name, alias.asname))
                self.outside[name] = home, named


class _Bundle:
    """The pieces that some functions need."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._needs: defaultdict[str, set[str]] = defaultdict(set)
        self._wanted: dict[str, set[str]] = {}

    def add(self, module: str, name: str) -> None:
        if name in self._wanted.setdefault(module, set()):
            return
        self._wanted[module].add(name)
        if module not in self._files:
            self._files[module] = _File(module)
        file = self._files[module]
        for piece in file.pieces:
            if name in piece.makes:
                for used in piece.uses:
                    self._use(file, used)

    def _use(self, file: _File, name: str) -> None:
        home = file.inside.get(name)
        if home == _ERRORS:
            assert name == "ApplyFailed", f"{file.module} raises {name}, which is not exported"
        elif home is not None:
            self._needs[file.module].add(home)
            self.add(home, name)
        elif any(name in piece.makes for piece in file.pieces) or name in file.outside:
            self.add(file.module, name)

    def imports(self) -> Iterator[str]:
        imports: defaultdict[str, set[str]] = defaultdict(set)
        for module, names in self._wanted.items():
            outside = self._files[module].outside
            for name in names & outside.keys():
                home, named = outside[name]
                imports[home].add(named)
        imports["torch"].add("nn")
        yield from (f"import {named}" for named in sorted(imports.pop("", ())))
        for home, several in sorted(imports.items()):
            yield f"from {home} import {', '.join(sorted(several))}"

    def pieces(self) -> Iterator[str]:
        """Yield the texts in dependency order, independent of Python's hash seed."""
        known: dict[str, str] = {}
        needs = {module: sorted(self._needs[module]) for module in sorted(self._files)}
        for module in TopologicalSorter(needs).static_order():
            for piece in self._files[module].pieces:
                if not piece.makes & self._wanted[module]:
                    continue
                for name in piece.makes:
                    assert name not in known, f"{name} is in {module} and in {known[name]}"
                    known[name] = module
                yield piece.text


def _made(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    return tuple(target.id for target in targets if isinstance(target, ast.Name))
