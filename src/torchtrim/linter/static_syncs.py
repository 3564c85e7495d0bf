"""Finds the host-device syncs of a source, inferred from the source alone.

Skips code that runs once or not on a device: constructors, loading and saving, branches for the CPU, for
tracing or for scripting, data sets and collators, and code that only raises an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from pathlib import PurePath
from typing import NamedTuple

from torchtrim.linter.infer import KindInference, computed
from torchtrim.linter.kinds import (
    PLAIN,
    UNKNOWN,
    ValueKind,
    annotated,
    is_open,
    joined,
    refined,
    sequence,
)
from torchtrim.linter.plain_calls import referred
from torchtrim.linter.scope import (
    ClassFacts,
    Environment,
    FileFacts,
    Outside,
    Wait,
    changing,
    guard,
)

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def keeps(function: Function) -> bool:
    """Return True if a function has lasting effects: on attributes of `self`, buffers, imports or classes."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        one = pending.pop()
        if isinstance(one, ast.Import | ast.ImportFrom | ast.ClassDef) or _registers(one):
            return True
        if any(map(_is_of_self, _targets(one))):
            return True
        for name in _BLOCKS:
            pending += getattr(one, name, ())
    return False


def is_asked_for(name: str, text: str, *, method: bool) -> bool:
    """Return True if a file's text may use the result of a function or method."""
    return f"self.{name}" in text if method else text.count(name) > 1


def _registers(statement: ast.AST) -> bool:
    called = statement.value if isinstance(statement, ast.Expr) else None
    function = called.func if isinstance(called, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr == "register_buffer"


def _targets(statement: ast.AST) -> Iterator[ast.AST]:
    """Return the targets that a statement binds, inside tuples too."""
    if isinstance(statement, ast.Assign):
        given = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        given = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        given = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        return
    pending = list(given)
    while pending:
        one = pending.pop()
        if isinstance(one, ast.Tuple | ast.List):
            pending += one.elts
        else:
            yield one.value if isinstance(one, ast.Starred) else one


def _is_of_self(target: ast.AST) -> bool:
    owner = target.value if isinstance(target, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "self"


_ONCE = re.compile(
    r"__(init|new|setstate|getstate|repr|str|post_init|reduce|del|init_subclass)__|extra_repr|"
    r"_?(init|reset|load|save|convert|resize|prune|setup|build|export|plot|show|visualize|dump)(_\w*)?|"
    r"lazy_init\w*|_?initiali[sz]e\w*|from_\w+|_?load_from\w*|register_\w+|post_init|tie_weights|dummy_inputs|main|"
    r"compute_(\w+_)?parameters"
)
_FOR_HOST = re.compile(
    r"\w*(Dataset|Sampler|Tokenizer|Processor\w*|FeatureExtractor|Collator\w*|DataLoader)"
)
_ON_HOST = re.compile(
    r"_?(torch_)?(collate|pad_collate)\w*|__getitem__|default_data_collator|_?preprocess\w*|"
    r"_?(prepare|normalize|resize|process|get|read|pad)_\w*(annotation|image|audio|video)s?|is_\w*scale"
)
_AFTER_THE_MODEL = re.compile(r"_?post_process\w*")
_PIPELINE = re.compile(r"(Chunk)?Pipeline")
_ONE_SHOT_FILES = re.compile(r"convert_\w+|export\w*|setup|conftest")
_TRANSPARENT = frozenset(
    ("property", "staticmethod", "classmethod", "no_grad", "inference_mode", "lru_cache", "cache")
)


class StaticSync(NamedTuple):
    """A sync point: a row of the sync table and a node."""

    row: str
    node: ast.AST


def static_syncs(
    tree: ast.Module,
    path: str,
    outside: Outside = lambda full: UNKNOWN,
    text: str | None = None,
    kinds: dict[ast.AST, ValueKind] | None = None,
) -> list[StaticSync]:
    """Return every sync point of a file in source order. `outside` resolves functions of other files.

    The code is walked twice, first for the results of functions and the attributes of `self`. If `text` is
    given, the first walk skips functions whose results the text does not use. `kinds` collects the kind of
    each expression.
    """
    walk = _Walk(path, facts_of(tree, path, outside, text), kinds=kinds)
    walk.file(tree)
    at = {(one.row, one.node): one for one in walk.found}
    return sorted(at.values(), key=lambda one: (one.node.lineno, one.node.col_offset))  # type: ignore[attr-defined]


def outline_of(tree: ast.Module, path: str) -> FileFacts:
    """Return a file's imports and the annotated results of its functions, without following code."""
    facts = FileFacts()
    _Walk(path, facts).outline(tree)
    return facts


def facts_of(tree: ast.Module, path: str, outside: Outside, text: str | None = None) -> FileFacts:
    """Return the results of a file's functions and the attributes of its classes, limited to those that
    `text` uses, if given."""
    facts = FileFacts(outside=outside)
    _Walk(path, facts, learns=True, text=text).file(tree)
    for one in facts.classes.values():
        one.complete = True
    return facts


class _Walk:
    """A walk over statements in execution order, each once."""

    def __init__(
        self,
        path: str,
        facts: FileFacts,
        *,
        learns: bool = False,
        text: str | None = None,
        kinds: dict[ast.AST, ValueKind] | None = None,
    ) -> None:
        self.found: list[StaticSync] = []
        self._facts = facts
        self._learns = learns
        self._text = text
        self._returned: list[list[ValueKind]] = []
        self._infer = KindInference(self._facts, _into(self.found))
        self._infer.kinds = kinds
        self._pending: list[Callable[[], None]] = []
        self._one_shot = _ONE_SHOT_FILES.fullmatch(PurePath(path).stem) is not None

    def file(self, tree: ast.Module) -> None:
        """Walk a module: top-level code first, then functions, when all names are known."""
        self.outline(tree)
        with self._infer.silent(self._one_shot or self._learns):
            self._block(tree.body)
            self._facts.own = dict(self._infer.env)
            while self._pending:
                self._pending.pop(0)()

    def outline(self, tree: ast.Module) -> None:
        """Read the module's imports and declarations."""
        self._imports(tree.body)
        self._declare(tree.body, self._facts.returns)

    def _imports(self, body: Iterable[ast.stmt]) -> None:
        """Read top-level imports, those within `if` and `try` too."""
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._import(statement)
            for name in ("body", "orelse", "handlers", "finalbody"):
                if isinstance(statement, ast.If | ast.Try):
                    self._imports(getattr(statement, name, ()))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in node.names:
            if isinstance(node, ast.Import):
                top = name.name.partition(".")[0]
                self._facts.imports[name.asname or top] = name.name if name.asname else top
            else:
                module = "." * node.level + (f"{node.module}." if node.module else "")
                self._facts.imports[name.asname or name.name] = f"{module}{name.name}"

    def _declare(self, body: Iterable[ast.stmt], returns: Environment) -> None:
        """Record the annotated results of functions."""
        for one in body:
            if isinstance(one, Function) and one.name not in returns:
                returns[one.name] = annotated(one.returns, self._infer.dotted)

    def _block(self, body: Iterable[ast.stmt]) -> bool:
        """Walk statements. Return True if the code after them is unreachable."""
        return any(_STATEMENTS[type(statement)](self, statement) for statement in body)

    def _assign(self, node: ast.Assign) -> None:
        kind = self._infer.held(node.value)
        for target in node.targets:
            self._infer.assign(target, kind, node.value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        said = annotated(node.annotation, self._infer.dotted)
        kind = self._infer.held(node.value)
        self._infer.assign(node.target, kind if kind != UNKNOWN else said, node.value)

    def _augmented(self, node: ast.AugAssign) -> None:
        right = self._infer.value(node.value)
        left = self._infer.value(node.target)
        self._infer.assign(node.target, computed(left, right, node.op))

    def _expression(self, node: ast.Expr) -> None:
        self._infer.value(node.value)

    def _return(self, node: ast.Return) -> bool:
        kind = self._infer.value(node.value)
        none = isinstance(node.value, ast.Constant) and node.value.value is None
        if self._returned and node.value is not None and not none:
            self._returned[-1].append(kind)
        return True

    def _raise(self, node: ast.Raise) -> bool:
        return True

    def _stops(self, node: ast.stmt) -> bool:
        return True

    def _passes(self, node: ast.stmt) -> None:
        return None

    def _assert(self, node: ast.Assert) -> None:
        self._infer.truth(node.test)
        self._infer.narrow(guard(node.test).when_true)

    def _if(self, node: ast.If) -> bool:
        self._infer.truth(node.test)
        said = guard(node.test)
        before = dict(self._infer.env)
        self._infer.narrow(said.when_true)
        with self._infer.silent(said.true):
            true_ends = self._block(node.body)
        true = self._infer.env
        self._infer.env = before
        self._infer.narrow(said.when_false)
        with self._infer.silent(said.false):
            false_ends = self._block(node.orelse)
        if true_ends and not false_ends and said.false:
            return True
        if false_ends and not true_ends:
            self._infer.env = true
        elif not true_ends:
            self._infer.env = merged(true, self._infer.env)
        return true_ends and false_ends

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> bool:
        before = dict(self._infer.env)
        marks = self._changing(node)
        self._infer.env |= dict.fromkeys(marks, PLAIN)
        if isinstance(node, ast.While):
            self._infer.truth(node.test)
        else:
            self._infer.loop(node.target, node.iter)
        self._block(node.body)
        self._infer.env = merged(before, self._infer.env)
        for mark in marks:
            self._infer.env.pop(mark, None)
        self._block(node.orelse)
        return False

    def _changing(self, node: ast.AST) -> set[str]:
        """Return the markers of names that a loop rebinds, if kinds are collected."""
        if self._infer.kinds is None:
            return set()
        bound = {
            changing(one.id)
            for one in ast.walk(node)
            if isinstance(one, ast.Name)
            and not isinstance(one.ctx, ast.Load)
            and one.id in self._infer.env
        }
        return bound - self._infer.env.keys()

    def _with(self, node: ast.With | ast.AsyncWith) -> bool:
        for item in node.items:
            kind = self._infer.value(item.context_expr)
            if item.optional_vars is not None:
                self._infer.assign(item.optional_vars, kind if kind.what == "plain" else UNKNOWN)
        return self._block(node.body)

    def _try(self, node: ast.Try) -> bool:
        before = dict(self._infer.env)
        ends = self._block(node.body)
        ends = self._block(node.orelse) or ends
        after = self._infer.env
        for handler in node.handlers:
            self._infer.env = dict(before)
            if not self._block(handler.body):
                after = merged(after, self._infer.env) if not ends else self._infer.env
                ends = False
        self._infer.env = after
        return self._block(node.finalbody) or ends

    def _match(self, node: ast.Match) -> None:
        self._infer.value(node.subject)
        before = dict(self._infer.env)
        for case in node.cases:
            self._infer.env = dict(before)
            self._block(case.body)
        self._infer.env = before

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._infer.env.pop(target.id, None)

    def _imported(self, node: ast.Import | ast.ImportFrom) -> None:
        self._import(node)
        for name in node.names:
            self._infer.env.pop(name.asname or name.name, None)

    def _class(self, node: ast.ClassDef) -> None:
        known = (self._facts.classes.get(getattr(base, "id", "")) for base in node.bases)
        facts = self._facts.classes.get(node.name) if not self._learns else None
        facts = facts or ClassFacts(node.name, bases=tuple(filter(None, known)))
        self._declare(node.body, facts.returns)
        self._facts.classes[node.name] = facts
        self._infer.env.pop(node.name, None)
        outer, self._infer.env = self._infer.env, {}
        for statement in node.body:
            if not isinstance(statement, Function):
                self._block([statement])
        self._infer.env = outer
        for_host, pipeline = _is_for_host(node), _has_base(node, _PIPELINE)
        methods = [one for one in node.body if isinstance(one, Function)]
        methods.sort(key=lambda one: one.name != "__init__")
        for one in methods:
            quiet = for_host and not _AFTER_THE_MODEL.fullmatch(one.name)
            quiet = quiet or (pipeline and one.name not in ("forward", "_forward"))
            self._later(one, facts, quiet=quiet)

    def _function(self, node: Function) -> None:
        if self._infer.this is None and not self._infer.env.get(" within"):
            self._later(node, None)
        else:
            self._within(node)
        self._infer.env.pop(node.name, None)

    def _later(self, node: Function, this: ClassFacts | None, *, quiet: bool = False) -> None:
        if self._learns and not self._teaches(node, this):
            return

        def walk() -> None:
            self._infer.env, self._infer.this = {" within": PLAIN}, this
            before = self._infer.yields
            with self._infer.silent(quiet):
                kinds = self._body(node)
            self._infer.this = None
            if self._learns and self._infer.yields == before:
                self._learn(node, this, kinds)

        self._pending.append(walk)

    def _teaches(self, node: Function, this: ClassFacts | None) -> bool:
        """Return True if following a function may show something that the file uses."""
        asked = self._text is None or is_asked_for(node.name, self._text, method=this is not None)
        return (asked and self._may_learn(node, this)) or keeps(node)

    def _may_learn(self, node: Function, this: ClassFacts | None) -> bool:
        """Return True if the `return`s may say more than the annotation."""
        returns = self._facts.returns if this is None else this.returns
        said = returns.get(node.name)
        if said is None or not is_open(said) or isinstance(node, ast.AsyncFunctionDef):
            return False
        return all(_called(one) in _TRANSPARENT for one in node.decorator_list)

    def _learn(self, node: Function, this: ClassFacts | None, kinds: list[ValueKind]) -> None:
        """Record a function's result from its `return`s, unless the annotation says more."""
        if not kinds or not self._may_learn(node, this):
            return
        returns = self._facts.returns if this is None else this.returns
        kind = refined(returns[node.name], reduce(joined, kinds))
        if not any(_called(one) == "property" for one in node.decorator_list):
            returns[node.name] = kind
        elif this is not None:
            this.set(node.name, kind)

    def _within(self, node: Function) -> None:
        """Walk a nested function, which sees the names around it."""
        outer = self._infer.env
        self._infer.env = dict(outer)
        self._body(node)
        self._infer.env = outer

    def _given(self, said: ValueKind, default: ast.expr) -> ValueKind:
        """Infer a parameter from its annotation, or from a function that is its default."""
        held = referred(self._infer, default)
        if held.what != "function" or said not in (UNKNOWN, PLAIN):
            return said
        return joined(held, UNKNOWN)

    def _body(self, node: Function) -> list[ValueKind]:
        """Walk a function's code and return its result."""
        arguments = node.args
        for one, default in _with_defaults(arguments):
            said = annotated(one.annotation, self._infer.dotted)
            self._infer.env[one.arg] = said if default is None else self._given(said, default)
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                said = annotated(extra.annotation, self._infer.dotted)
                self._infer.env[extra.arg] = (
                    sequence(said) if extra is arguments.vararg else UNKNOWN
                )
        once = _ONCE.fullmatch(node.name) and not (node.name == "main" and _trains(node))
        once = once or _ON_HOST.fullmatch(node.name) is not None
        self._returned.append([])
        with self._infer.silent(bool(once)):
            self._block(node.body)
        return self._returned.pop()


def _with_defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Return the parameters of a function with their defaults."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    without = len(by_place) - len(arguments.defaults)
    yield from zip(by_place, [*[None] * without, *arguments.defaults], strict=True)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def merged(one: Environment, other: Environment) -> Environment:
    """Join the names of two branches. A name bound in one branch only keeps its kind."""
    if one is other:
        return one
    found = dict(one)
    for name, kind in other.items():
        mine = one.get(name)
        found[name] = kind if mine is None or mine == kind else joined(mine, kind)
    return found


def _into(found: list[StaticSync]) -> Wait:
    """Return an appender to a list. It does not refer to the walk, so the walk and its tree are freed early
    on."""

    def wait(row: str, node: ast.AST) -> None:
        found.append(StaticSync(row, node))

    return wait


def _called(decorator: ast.expr) -> str:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _trains(node: Function) -> bool:
    """Return True if a statement contains a training loop, whose body runs many times."""
    return any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in ast.walk(node))


def _is_for_host(node: ast.ClassDef) -> bool:
    return _FOR_HOST.fullmatch(node.name) is not None or _has_base(node, _FOR_HOST)


def _has_base(node: ast.ClassDef, named: re.Pattern[str]) -> bool:
    bases = (getattr(base, "id", getattr(base, "attr", "")) for base in node.bases)
    return any(named.fullmatch(name) for name in bases)


_STATEMENTS: dict[type, Callable[..., bool | None]] = {
    ast.Assign: _Walk._assign,
    ast.AnnAssign: _Walk._annotated,
    ast.AugAssign: _Walk._augmented,
    ast.Expr: _Walk._expression,
    ast.Return: _Walk._return,
    ast.Raise: _Walk._raise,
    ast.Continue: _Walk._stops,
    ast.Break: _Walk._stops,
    ast.Pass: _Walk._passes,
    ast.Global: _Walk._passes,
    ast.Nonlocal: _Walk._passes,
    ast.Assert: _Walk._assert,
    ast.If: _Walk._if,
    ast.For: _Walk._loop,
    ast.AsyncFor: _Walk._loop,
    ast.While: _Walk._loop,
    ast.With: _Walk._with,
    ast.AsyncWith: _Walk._with,
    ast.Try: _Walk._try,
    ast.TryStar: _Walk._try,
    ast.Match: _Walk._match,
    ast.Delete: _Walk._delete,
    ast.Import: _Walk._imported,
    ast.ImportFrom: _Walk._imported,
    ast.ClassDef: _Walk._class,
    ast.FunctionDef: _Walk._function,
    ast.AsyncFunctionDef: _Walk._function,
}
if hasattr(ast, "TypeAlias"):
    _STATEMENTS[ast.TypeAlias] = _Walk._passes
