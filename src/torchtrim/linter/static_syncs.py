"""Finds the host-device syncs of a source, inferred from the source alone.

Skips code that runs rarely or not on a device: constructors, loading and saving, branches of every N steps,
the end of an epoch, the filling of caches, branches for the CPU, for tracing or for scripting, data sets and
collators, and code that only raises an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import chain
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
    changing,
    filled_cache,
    guard,
    is_self,
)
from torchtrim.source.nodes import called, find_all, is_stored, name_set, names_bound

Function = ast.FunctionDef | ast.AsyncFunctionDef


def keeps(function: Function) -> bool:
    """Return True if a function has lasting effects: on attributes of `self`, buffers, imports or classes."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef):
            return True
        if isinstance(node, ast.Expr):
            call = node.value.func if isinstance(node.value, ast.Call) else None
            if isinstance(call, ast.Attribute) and call.attr == "register_buffer":
                return True
        attributes = (find_all(target, ast.Attribute) for target in _targets(node))
        if any(is_stored(part) and is_self(part.value) for part in chain(*attributes)):
            return True
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            pending += getattr(node, name, ())
    return False


def is_used(name: str, text: str, *, method: bool) -> bool:
    """Return True if a file's text may use the result of a function or method."""
    return f"self.{name}" in text if method else text.count(name) > 1


def _targets(statement: ast.AST) -> Iterator[ast.AST]:
    if isinstance(statement, ast.Assign):
        yield from statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        yield statement.target
    elif isinstance(statement, ast.With | ast.AsyncWith):
        yield from (item.optional_vars for item in statement.items if item.optional_vars)


_ONCE = re.compile(
    r"__(init|new|setstate|getstate|repr|str|post_init|reduce|del|init_subclass)__|extra_repr|"
    r"_?(init|reset|load|save|convert|resize|prune|setup|build|export|plot|show|visualize|dump)(_\w*)?|"
    r"lazy_init\w*|_?initiali[sz]e\w*|from_\w+|_?load_from\w*|register_\w+|post_init|tie_weights|dummy_inputs|main|"
    r"compute_(\w+_)?parameters"
)
_LAZY = re.compile(r"_?init_\w+|lazy_init\w*|_?initiali[sz]e\w*")
_FOR_HOST = re.compile(
    r"\w*(Dataset|Tokenizer|Processor\w*|FeatureExtractor|Collator\w*|DataLoader)|"
    r"(Distributed|Batch|Random|Sequential|WeightedRandom|SubsetRandom)?Sampler"
)
_ON_HOST = re.compile(
    r"_?(torch_)?(collate|pad_collate)\w*|__getitem__|default_data_collator|_?preprocess\w*|"
    r"_?(prepare|normalize|resize|process|get|read|pad)_\w*(annotation|image|audio|video)s?|is_\w*scale"
)
_AFTER_THE_MODEL = re.compile(r"_?post_process\w*")
_PIPELINE = re.compile(r"(Chunk)?Pipeline")
_ONE_SHOT_FILES = re.compile(r"convert_\w+|export\w*|setup|conftest")
_TRANSPARENT = name_set("property staticmethod classmethod no_grad inference_mode lru_cache cache")


class StaticSync(NamedTuple):
    """A sync point: a row of the sync table and an expression."""

    row: str
    node: ast.expr


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
    return sorted(
        dict.fromkeys(walk.found), key=lambda sync: (sync.node.lineno, sync.node.col_offset)
    )


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
    for known in facts.classes.values():
        known.complete = True
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
        found: list[StaticSync] = []
        self.found = found
        self._facts = facts
        self._learns = learns
        self._text = text
        self._returned: list[list[ValueKind]] = []
        # Refers to the list, not to the walk: without a cycle, the walk and its tree are freed early on.
        self._infer = KindInference(facts, lambda row, node: found.append(StaticSync(row, node)))
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
        self._imports(tree.body)
        self._declare(tree.body, self._facts.returns)

    def _imports(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._import(statement)
            elif isinstance(statement, ast.If | ast.Try):
                for name in ("body", "orelse", "finalbody"):
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
        for node in body:
            if isinstance(node, Function) and node.name not in returns:
                returns[node.name] = annotated(node.returns, self._infer.dotted)

    def _block(self, body: Iterable[ast.stmt]) -> bool:
        """Walk statements. Return True if the code after them is unreachable."""
        statements = list(body)
        for at, statement in enumerate(statements, 1):
            if _STATEMENTS[type(statement)](self, statement):
                return True
            if _is_epoch(statement) and not any(map(_trains, statements[at:])):
                with self._infer.silent():
                    return self._block(statements[at:])
        return False

    def _assign(self, node: ast.Assign) -> None:
        kind = self._infer.held(node.value)
        for target in node.targets:
            self._infer.assign(target, kind, node.value)

    def _annotated(self, node: ast.AnnAssign) -> None:
        kind = self._infer.held(node.value)
        if kind == UNKNOWN:
            kind = annotated(node.annotation, self._infer.dotted)
        self._infer.assign(node.target, kind, node.value)

    def _augmented(self, node: ast.AugAssign) -> None:
        right = self._infer.value(node.value)
        self._infer.assign(node.target, computed(self._infer.value(node.target), right, node.op))

    def _expression(self, node: ast.Expr) -> None:
        self._infer.value(node.value)

    def _return(self, node: ast.Return) -> bool:
        kind = self._infer.value(node.value)
        none = isinstance(node.value, ast.Constant) and node.value.value is None
        if self._returned and node.value is not None and not none:
            self._returned[-1].append(kind)
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
        implied = guard(node.test)
        before = dict(self._infer.env)
        self._infer.narrow(implied.when_true)
        filled = filled_cache(node)
        # A dictionary that the function itself creates is filled in each call.
        kept = bool(filled) and self._infer.env.get(filled, UNKNOWN).what != "mapping"
        with self._infer.silent(implied.true or kept):
            true_ends = self._block(node.body)
        true = self._infer.env
        self._infer.env = before
        self._infer.narrow(implied.when_false)
        with self._infer.silent(implied.false):
            false_ends = self._block(node.orelse)
        if true_ends and not false_ends and implied.false:
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
        known = self._infer.env.keys()
        return {changing(name) for name in names_bound(node) & known} - known

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
        for_host = _FOR_HOST.fullmatch(node.name) is not None or _has_base(node, _FOR_HOST)
        for_host |= node.name.endswith("Sampler") and "__iter__" in facts.returns
        pipeline = _has_base(node, _PIPELINE)
        methods = [statement for statement in node.body if isinstance(statement, Function)]
        methods.sort(key=lambda method: method.name != "__init__")
        for method in methods:
            quiet = for_host and not _AFTER_THE_MODEL.fullmatch(method.name)
            quiet = quiet or (pipeline and method.name not in ("forward", "_forward"))
            self._later(method, facts, quiet=quiet)

    def _function(self, node: Function) -> None:
        if self._infer.this is None and not self._infer.env.get(" within"):
            self._later(node, None)
        else:
            outer = self._infer.env
            self._infer.env = dict(outer)
            self._body(node)
            self._infer.env = outer
        self._infer.env.pop(node.name, None)

    def _later(self, node: Function, this: ClassFacts | None, *, quiet: bool = False) -> None:
        used = self._text is None or is_used(node.name, self._text, method=this is not None)
        if self._learns and not (used and self._may_learn(node, this)) and not keeps(node):
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

    def _may_learn(self, node: Function, this: ClassFacts | None) -> bool:
        """Return True if the `return`s may say more than the annotation."""
        kind = (self._facts if this is None else this).returns.get(node.name)
        if kind is None or not is_open(kind) or isinstance(node, ast.AsyncFunctionDef):
            return False
        return _decorators(node) <= _TRANSPARENT

    def _learn(self, node: Function, this: ClassFacts | None, kinds: list[ValueKind]) -> None:
        """Record a function's result from its `return`s, unless the annotation says more."""
        if not kinds or not self._may_learn(node, this):
            return
        returns = self._facts.returns if this is None else this.returns
        kind = refined(returns[node.name], reduce(joined, kinds))
        if "property" not in _decorators(node):
            returns[node.name] = kind
        elif this is not None:
            this.set(node.name, kind)

    def _body(self, node: Function) -> list[ValueKind]:
        """Walk a function's code and return the kinds of its results."""
        arguments = node.args
        for parameter, default in _with_defaults(arguments):
            kind = annotated(parameter.annotation, self._infer.dotted)
            if default is not None and kind in (UNKNOWN, PLAIN):
                held = referred(self._infer, default)
                kind = joined(held, UNKNOWN) if held.what == "function" else kind
            self._infer.env[parameter.arg] = kind
        if (extra := arguments.vararg) is not None:
            self._infer.env[extra.arg] = sequence(annotated(extra.annotation, self._infer.dotted))
        if arguments.kwarg is not None:
            self._infer.env[arguments.kwarg.arg] = UNKNOWN
        once = _ONCE.fullmatch(node.name) and not (
            node.name == "main"
            and any(part.attr == "backward" for part in find_all(node, ast.Attribute))
        )
        self._returned.append([])
        guards = _guards(node) if once else []
        if not self._block(guards):
            with self._infer.silent(bool(once or _ON_HOST.fullmatch(node.name))):
                self._block(node.body[len(guards) :])
        return self._returned.pop()


def _guards(node: Function) -> list[ast.stmt]:
    """Return the start of a function that is called each time, and returns if it has run: `if self.done:`."""
    first = 1 if ast.get_docstring(node) is not None else 0
    (*_, test) = node.body[: first + 1]
    asks = isinstance(test, ast.If) and not test.orelse and isinstance(test.body[0], ast.Return)
    return node.body[: first + 1] if asks and _LAZY.fullmatch(node.name) else []


def _with_defaults(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    by_place = [*arguments.posonlyargs, *arguments.args]
    without = len(by_place) - len(arguments.defaults)
    yield from zip(by_place, [*[None] * without, *arguments.defaults], strict=True)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def _is_epoch(node: ast.stmt) -> bool:
    """Return True for a loop over batches that trains: what follows it runs once per epoch."""
    counted = isinstance(node, ast.For) and called(getattr(node.iter, "func", node)) == "range"
    return isinstance(node, ast.For) and not counted and _trains(node, "backward", "step")


def _trains(node: ast.stmt, *methods: str) -> bool:
    used = {part.attr for part in find_all(node, ast.Attribute)}
    return used.issuperset(methods or ("backward",))


def merged(one: Environment, other: Environment) -> Environment:
    """Join the names of two branches. A name bound in one branch only keeps its kind."""
    return one | {name: joined(one.get(name, kind), kind) for name, kind in other.items()}


def _decorators(node: Function) -> set[str]:
    return {called(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}


def _has_base(node: ast.ClassDef, pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(called(base)) for base in node.bases)


_STATEMENTS: dict[type, Callable[..., bool | None]] = {
    ast.Assign: _Walk._assign,
    ast.AnnAssign: _Walk._annotated,
    ast.AugAssign: _Walk._augmented,
    ast.Expr: _Walk._expression,
    ast.Return: _Walk._return,
    ast.Raise: _Walk._stops,
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
