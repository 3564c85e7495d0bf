"""Functions of user code that can run alone: on given inputs, with no effect outside themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from torchtrim.source.names import stores
from torchtrim.source.nodes import name_set, names_bound
from torchtrim.source.source import SourceFile

_Function = ast.FunctionDef
_BUILTINS = name_set("""
    abs all any bool dict enumerate float int isinstance len list max min range reversed round set
    slice sorted str sum tuple zip True False None ValueError RuntimeError TypeError AssertionError
    IndexError NotImplementedError
""")
_OUTSIDE = (
    ast.While,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
    ast.Global,
    ast.Nonlocal,
    ast.Import,
    ast.ImportFrom,
    ast.ClassDef,
    ast.AsyncFunctionDef,
    ast.AsyncFor,
    ast.AsyncWith,
)
_MODULES = name_set("nn linalg special fft")
_EFFECTS = name_set("""
    save load seed manual_seed initial_seed compile from_file use_deterministic_algorithms numpy
    share_memory_ backward register_hook cuda format
""")
_WITH_EFFECTS = name_set("""
    cuda distributed jit hub utils ops library classes multiprocessing backends autograd random
    package onnx overrides profiler testing accelerator xpu mps cpu export func futures os sys
""")
_MODES = ("torch.no_grad", "torch.enable_grad", "torch.inference_mode")


@dataclass(frozen=True)
class AloneFunction:
    """A function with all that it uses, as a module without imports of user code.

    `inputs` are the reads of each parameter, and of each attribute of `self`, by text. `defaults` are the
    parameters that may be left out. `constants` are the integers in its code.
    """

    name: str
    owner: str
    module: ast.Module
    inputs: dict[str, list[ast.expr]]
    defaults: frozenset[str]
    bound: bool
    constants: frozenset[int]


def alone(source: SourceFile, node: ast.AST) -> AloneFunction | None:
    """Return the outermost function around a node if it can run alone, else None."""
    functions = [one for one in source.around(node) if isinstance(one, _Function)]
    return _alone(source, functions[-1]) if functions else None


def named(source: SourceFile, like: AloneFunction) -> AloneFunction | None:
    """Return the function of another source with the name and class of one, if it can run alone."""
    for one in source.each(_Function):
        if one.name == like.name and _owner(source, one) == like.owner:
            return _alone(source, one)
    return None


def _owner(source: SourceFile, function: ast.AST) -> str:
    outer = source.parents[function]
    return outer.name if isinstance(outer, ast.ClassDef) else ""


def _alone(source: SourceFile, function: _Function) -> AloneFunction | None:
    needed = _Needed(source)
    itself = _self_of(source, function)
    if itself is None or not needed.accepts(function, itself):
        return None
    inputs = _inputs(source, function, itself)
    arguments = function.args
    if arguments.vararg or arguments.kwarg:
        return None
    integers = (
        one.value
        for part in (*needed.statements.values(), function)
        for one in ast.walk(part)
        if isinstance(one, ast.Constant) and type(one.value) is int
    )
    body = [*needed.imports(), *needed.ordered(), function]
    return AloneFunction(
        name=function.name,
        owner=_owner(source, function),
        module=_bare(ast.Module(body, [])),
        inputs=inputs,
        defaults=_optional(arguments),
        bound=bool(itself),
        constants=frozenset(integers),
    )


def _optional(arguments: ast.arguments) -> frozenset[str]:
    """Return the parameters with a default."""
    placed = [*arguments.posonlyargs, *arguments.args]
    late = placed[len(placed) - len(arguments.defaults) :]
    words = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return frozenset([one.arg for one in late] + [one.arg for one, value in words if value])


def _self_of(source: SourceFile, function: _Function) -> str | None:
    """Return the name of a method's first parameter, `""` for a function, None for other code."""
    outer = source.parents[function]
    if isinstance(outer, ast.Module):
        return ""
    if not isinstance(outer, ast.ClassDef) or not isinstance(source.parents[outer], ast.Module):
        return None
    if any(isinstance(one, ast.Name) for one in function.decorator_list):
        return "" if ast.unparse(function.decorator_list[0]) == "staticmethod" else None
    return function.args.args[0].arg if function.args.args else None


def _inputs(source: SourceFile, function: _Function, itself: str) -> dict[str, list[ast.expr]]:
    """Return the reads of each parameter and attribute while it has the value it was given."""
    own = function.args
    given = [one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
    inputs: dict[str, list[ast.expr]] = {name: [] for name in given if name != itself}
    for node in _reads(function):
        if isinstance(node, ast.Attribute) and itself and ast.unparse(node.value) == itself:
            inputs.setdefault(ast.unparse(node), []).append(node)
        elif isinstance(node, ast.Name) and node.id in inputs and _is_given(source, function, node):
            inputs[node.id].append(node)
    return inputs


def _is_given(source: SourceFile, function: _Function, name: ast.Name) -> bool:
    """Return True if no statement before a read of a parameter assigns it."""
    places = stores(function, name.id)
    return all(source.end(source.statement(one)) > source.start(name) for one in places)


def _reads(function: _Function) -> Iterator[ast.Name | ast.Attribute]:
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield node


class _Needed:
    """The constants and helper functions of the module that functions use."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self.statements: dict[str, ast.stmt] = {}
        self._used: set[str] = set()

    def accepts(self, code: ast.AST, itself: str = "") -> bool:
        """Return True if the code has no effect outside, and all that it uses has none."""
        return all(self._is_inner(node, itself) for node in ast.walk(code))

    def imports(self) -> list[ast.stmt]:
        """Return an import for each imported name in use."""
        lines = []
        for name in sorted(self._used):
            module, _, last = self._source.imported[name].rpartition(".")
            lines.append(f"from {module} import {last} as {name}" if module else f"import {last}")
            if not module and last != name:
                lines[-1] += f" as {name}"
        return ast.parse("\n".join(lines)).body

    def ordered(self) -> list[ast.stmt]:
        """Return the statements in the file's order."""
        return sorted(set(self.statements.values()), key=lambda one: one.lineno)

    def _is_inner(self, node: ast.AST, itself: str) -> bool:
        if isinstance(node, _OUTSIDE):
            return False
        if isinstance(node, _Function):
            return all(self._is_mode(one) for one in node.decorator_list)
        if isinstance(node, ast.With):
            return all(self._is_mode(one.context_expr) for one in node.items)
        if isinstance(node, ast.Attribute):
            return self._is_attribute(node, itself)
        if isinstance(node, ast.Name):
            return self._is_name(node, itself)
        return True

    def _is_mode(self, node: ast.expr) -> bool:
        function = node.func if isinstance(node, ast.Call) else node
        return self._source.dotted(function) in _MODES or ast.unparse(node) == "staticmethod"

    def _is_attribute(self, node: ast.Attribute, itself: str) -> bool:
        if node.attr.startswith("_") or node.attr in _EFFECTS:
            return False
        if itself and isinstance(node.value, ast.Name) and node.value.id == itself:
            called = getattr(self._source.parents.get(node), "func", None) is node
            return isinstance(node.ctx, ast.Load) and not called
        return True

    def _is_name(self, node: ast.Name, itself: str) -> bool:
        source, outer = self._source, self._source.parents.get(node)
        if itself and node.id == itself:
            return isinstance(outer, ast.Attribute)
        if self._is_annotation(node):
            return True
        functions = (one for one in source.around(node) if isinstance(one, _Function | ast.Lambda))
        if any(node.id in source.bound(one) for one in functions):
            return True
        if node.id in source.imported:
            self._used.add(node.id)
            return self._is_library(node)
        if isinstance(node.ctx, ast.Store) or node.id in self.statements:
            return True
        own = self._of_module(node.id)
        return self._adds(node.id, own) if own is not None else node.id in _BUILTINS

    def _is_library(self, node: ast.Name) -> bool:
        """Return True for a function of math or torch without an effect, or a type of torch."""
        words, whole = self._source.imported[node.id].split("."), node_above(self._source, node)
        words += ast.unparse(whole).split(".")[1:]
        if words[0] == "math":
            return True
        if words[0] != "torch" or len(words) < 2 or words[1].startswith("set_"):
            return False
        if len(words) > 2 and words[1] not in _MODULES:
            return words[1] not in _WITH_EFFECTS
        return _EFFECTS.isdisjoint(words) and words[1] not in _WITH_EFFECTS

    def _is_annotation(self, node: ast.AST) -> bool:
        for outer in (node, *self._source.around(node)):
            if isinstance(outer, ast.arg):
                return True
            parent = self._source.parents.get(outer)
            if isinstance(parent, ast.AnnAssign) and parent.annotation is outer:
                return True
            if isinstance(parent, _Function) and parent.returns is outer:
                return True
        return False

    def _of_module(self, name: str) -> ast.stmt | None:
        """Return the only statement of the module that binds a name: a definition or an assignment."""
        bound = [one for one in self._source.tree.body if name in _binds(one)]
        return bound[0] if len(bound) == 1 else None

    def _adds(self, name: str, statement: ast.stmt) -> bool:
        self.statements[name] = statement
        plain = isinstance(statement, ast.Assign | ast.AnnAssign | _Function)
        return plain and self.accepts(statement)


def node_above(source: SourceFile, node: ast.expr) -> ast.expr:
    """Return the longest dotted name that begins with a name."""
    while isinstance(outer := source.parents.get(node), ast.Attribute):
        node = outer
    return node


def _binds(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of the module binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    return names_bound(statement)


class _Bare(ast.NodeTransformer):
    """Leaves out annotations, which may need names of other modules."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        kept = [one for one in node.decorator_list if ast.unparse(one) != "staticmethod"]
        fields = dict(ast.iter_fields(node)) | {"returns": None, "decorator_list": kept}
        return ast.copy_location(ast.FunctionDef(**fields), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(node.arg, None), node)


def _bare(module: ast.Module) -> ast.Module:
    bare = ast.parse(ast.unparse(module))
    _Bare().visit(bare)
    return bare
