"""Finds side effects of a module's code: writes to lists, globals, files, other objects' attributes.

Code with side effects must not run twice, as recomputation would. The search covers the source of `forward`,
of hooks and of their callees, with names resolved to their current objects, and branches that have not run
yet. Writes to a module's own buffers, tensors and attributes do not count, since they can be restored.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dis
import functools
import inspect
import io
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.capture.code.assigned import reads_of_this_call
from torchtrim.capture.code.hooks import forward_hooks_on_all, hooks_of
from torchtrim.capture.code.live import (
    UNKNOWN,
    Resolved,
    Scope,
    content,
    function_of,
    is_generator,
    is_trusted,
    own_nodes,
)
from torchtrim.capture.code.outside import (
    OuterValue,
    of_class,
    of_closure,
    of_default,
    of_item,
    outer_values,
)
from torchtrim.capture.code.syntax import (
    appended_to,
    filled_once,
    name_of,
    opens_for_writing,
    raising,
)
from torchtrim.core.isolation import debugging, said_of

_DEPTH = 12
"""Nested calls. Arbitrary: deeper code is not read."""

_SMALL = 16
"""Elements. Arbitrary: programs keep their random generators in short lists."""
_WRITING_NAMES = """
    append appendleft extend extendleft insert add update pop popleft popitem remove discard clear setdefault
    sort reverse rotate put put_nowait send write writelines writerow writerows subtract fill __setitem__
    __delitem__ __iadd__ intersection_update difference_update symmetric_difference_update cache_clear inc
    observe log_metric add_scalar add_histogram flush truncate
"""
_WRITES = frozenset(_WRITING_NAMES.split())
_WRITING_FUNCTIONS = """
    heappush heappop heapreplace heappushpop heapify insort insort_left insort_right shuffle iadd setitem
    delitem
"""
_WRITE_TO_ARGUMENT = frozenset(_WRITING_FUNCTIONS.split())
_STARRED = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_GIVEN_TO_HOOKS = 4
"""A module, the arguments of its call, those by name, and its result."""
_CONTAINERS = (list, dict, set, bytearray, collections.deque, io.IOBase)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_READS = (ast.Name, ast.Attribute, ast.Subscript)
_IMMUTABLE = (int, float, complex, str, bytes, bool, tuple, frozenset, type(None))
_SAVES = frozenset(("save", "savez", "savetxt", "dump", "to_csv", "to_json", "savefig", "imsave"))


class Write(NamedTuple):
    """A side effect: a description and its location. `onto`: the list that it appends to, if that is all, and
    the name that it has there.
    """

    does: str
    path: str
    line: int
    onto: tuple[str, list[Any]] | None = None

    def __str__(self) -> str:
        return f"it {self.does} at {self.path.rpartition('/')[2]}:{self.line}"


CalledFunction = types.FunctionType | functools.partial[Any]
"""A function, with the arguments of its call where they are known: `UNKNOWN` for what outlives the call."""


class Reference(NamedTuple):
    """A place that leads to code or random numbers, and the value that it had."""

    place: OuterValue
    value: Any


class SideEffects:
    """Side effects of the code of modules, of hooks on all modules, and of functions; random generators it
    may use, and other modules it calls.

    `reads` are the names of the attributes that it reads before it sets them; `is_unread`: it may read any
    others. `references` are the names that lead to code and state, with their values: the result is stale
    once one changes.
    `outside` are the values that it reads outside of the modules.
    """

    def __init__(
        self, modules: Iterable[nn.Module], functions: Iterable[CalledFunction] = ()
    ) -> None:
        self.writes: list[Write] = []
        self.generators: list[Any] = []
        self.modules: list[nn.Module] = []
        self.references: list[Reference] = []
        self.outside: dict[tuple[int, str], OuterValue] = {}
        self.reads: set[str] = set()
        self.is_unread = False
        self._read_lists: set[int] = set()
        self._defaults: set[int] = set()
        self._read_names: set[str] = set()
        self._known: set[int] = set()
        self._done: set[tuple[Any, ...]] = set()
        self._referred: set[tuple[int, str]] = set()
        for module in modules:
            self._add(module)
        for function in functions:
            home = getattr(function, "func", function).__module__
            self._try(lambda one: self._call(one, 0), function, home)
        for module in self.modules:
            self._try(self._look_at, module, type(module).__module__)
        for hook in forward_hooks_on_all() if self.modules else ():
            self._try(self._look_at_hook, hook, str(getattr(hook, "__module__", "")))

    @property
    def grown(self) -> list[list[Any]]:
        """Return the lists that the code appends to and does not read."""
        every = [one.onto[1] for one in self.writes if one.onto and self._is_unseen(*one.onto)]
        return [*{id(one): one for one in every}.values()]

    @property
    def lasting(self) -> list[Write]:
        """Return the writes that a rerun repeats even if it takes back what it appends to `grown` lists."""
        return [one for one in self.writes if not (one.onto and self._is_unseen(*one.onto))]

    @property
    def recorded(self) -> tuple[str, bool]:
        """Return the first write, a lasting one if there is one, and True if a rerun can take all back."""
        lasting = self.lasting
        return next(map(str, lasting or self.writes), ""), bool(self.writes) and not lasting

    def _is_unseen(self, name: str, one: list[Any]) -> bool:
        # In the place of a default, the code may give any list that it reads.
        is_default = id(one) in self._defaults
        is_read = self._read_lists if is_default else id(one) in self._read_lists
        return not (self.is_unread or is_read or name in self._read_names)

    def _loads(self, name: str, found: Any) -> None:
        """Note a list that code reads, or a name under which it may read one."""
        if type(found) is list:
            self._read_lists.add(id(found))
        elif found is UNKNOWN:
            self._read_names.add(name)

    def _try(self, look: Callable[[Any], None], thing: Any, module: str) -> None:
        """Read code; code that cannot be read counts as a write."""
        try:
            look(thing)
        except Exception as error:
            if debugging():
                raise
            path = getattr(sys.modules.get(module), "__file__", None) or ""
            self.writes.append(Write(f"cannot be read ({said_of(error)})", path, 0))

    def _add(self, module: nn.Module) -> None:
        if id(module) not in self._known:
            self._known.add(id(module))
            self.modules.append(module)

    def _look_at(self, module: nn.Module) -> None:
        for name, value in vars(module).items():
            if self._note_generators(value):
                self._watch(of_item(vars(module), name))
        if "forward" in vars(module):
            self._call(vars(module)["forward"], 0)
        else:
            self._look_at_class(module)
        for hook in hooks_of(module):
            self._call(hook, 0)

    def _look_at_hook(self, hook: Any) -> None:
        """Read a hook on all modules, whose arguments all outlive the call."""
        function, _ = function_of(hook) or (None, ())
        if function is not None and _is_read_whole(function):
            self._call(functools.partial(hook, *[UNKNOWN] * _GIVEN_TO_HOOKS), 0)
            return
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        code = getattr(function, "__code__", None)
        site = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
        self.writes.append(Write(f"may write in `{name}`, a hook on all modules,", *site))

    def _look_at_class(self, module: nn.Module) -> None:
        """Read the forward of a module's class, or of the original class if a technique subclassed it."""
        kind = next(
            kind
            for kind in type(module).__mro__
            if "forward" in vars(kind) and "_torchtrim_swapped" not in vars(kind)
        )
        forward = vars(kind)["forward"]
        self._watch(of_class(kind, "forward"))
        if not isinstance(forward, types.FunctionType) or not is_trusted(forward):
            self._call(types.MethodType(forward, module), 0)
            return
        # Layers of torch call `torch.nn.functional`, which a program may patch.
        table = vars(torch.nn.functional)
        for name in set(forward.__code__.co_names) & table.keys():
            self._watch(of_item(table, name))
            if isinstance(table[name], types.FunctionType):
                self._call(table[name], 1)

    def _call(
        self,
        called: Any,
        depth: int,
        arguments: Sequence[Resolved] = (),
        keywords: Iterable[tuple[str, Resolved]] = (),
    ) -> None:
        resolved = function_of(called)
        if resolved is None or depth > _DEPTH:
            return
        function, bound = resolved
        if is_trusted(function):
            # A library function may wrap the program's functions, as a decorator does.
            for inner in map(content, function.__closure__ or ()):
                if isinstance(inner, (types.FunctionType, types.MethodType)):
                    self._call(inner, depth + 1, [Resolved(one, True) for one in bound])
            return
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            found = content(cell)
            if self._leads_on(found):
                self._watch(of_closure(cell, name))
            self._reads_outside(found, of_closure(cell, name))
        given = [*(Resolved(value, True) for value in bound), *arguments]
        partial = called.keywords if isinstance(called, functools.partial) else {}
        named = {name: Resolved(value, True) for name, value in partial.items()} | dict(keywords)
        key = (
            function.__code__,
            *((id(one.value), one.outlives) for one in given),
            *((name, id(one.value), one.outlives) for name, one in named.items()),
        )
        if key in self._done:
            return
        self._done.add(key)
        if (scope := Scope.of(function, self._refer)) is None:
            self._take_from_bytecode(function.__code__)
            return
        # All calls share a default that is a container.
        code, kwdefaults = function.__code__, function.__kwdefaults__ or {}
        names = reversed(code.co_varnames[: code.co_argcount])
        defaults = zip(names, reversed(function.__defaults__ or ()), strict=False)
        for name, value in (*defaults, *kwdefaults.items()):
            if isinstance(value, _CONTAINERS):
                scope.given[name] = Resolved(value, True)
                self._defaults.add(id(value))
                self._reads_outside(value, of_default(function, name, value))
        scope.given.update(zip(scope.parameters, given, strict=False))
        scope.given.update((name, one) for name, one in named.items() if name in scope.given)
        _SideEffectReader(self, scope, function.__code__.co_filename, depth).read()

    def _take_from_bytecode(self, code: types.CodeType) -> None:
        """Collect the names from the bytecode of a function without source."""
        self.is_unread = True
        globals_ = {
            one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL"
        }
        site = code.co_filename, code.co_firstlineno
        for name in sorted(globals_ | (_WRITES & set(code.co_names))):
            self.writes.append(Write(f"may write (`{name}`)", *site))

    def _refer(self, table: Any, name: str, found: Any) -> None:
        leads_on = self._leads_on(found)
        if found is not UNKNOWN or name not in vars(builtins):
            self._reads_outside(found, *outer_values(table, name))
        self._reads_by_descriptor(table, name)
        if leads_on and (type(table) is dict or hasattr(table, "__dict__")):
            self._watch_name(table, name)

    def _leads_on(self, found: Any) -> bool:
        """Return True for what leads to code, state or random numbers. Modules are looked at anyway."""
        if self._note_generators(found):
            return True
        leads = callable(found) or found is UNKNOWN or isinstance(found, _CONTAINERS)
        return leads and not isinstance(found, nn.Module)

    def _reads_outside(self, found: Any, *places: OuterValue) -> None:
        """Note places that hold no code: numbers, tensors, objects, and missing names."""
        is_partial = isinstance(found, functools.partial)
        if isinstance(found, types.ModuleType) or (callable(found) and not is_partial):
            return
        for one in places:
            self.outside.setdefault((one.owner, one.name), one)

    def _reads_by_descriptor(self, table: Any, name: str) -> None:
        """Note the attributes that a property or another descriptor of the program reads by their names."""
        found = inspect.getattr_static(type(table), name, None)
        getter = getattr(found, "fget", None) or getattr(type(found), "__get__", None)
        if not isinstance(found, types.FunctionType) and isinstance(getter, types.FunctionType):
            code = getter.__code__
            names = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
            self.reads |= names
            self._read_names |= names

    def _watch_name(self, table: Any, name: str) -> None:
        """Watch the places where a name is looked up: in a dict, in an object and its class, in a class."""
        if isinstance(table, type):
            self._watch(of_class(table, name))
            return
        self._watch(of_item(table if type(table) is dict else vars(table), name))
        kinds = () if type(table) is dict else type(table).__mro__
        for kind in [kind for kind in kinds if name in vars(kind)][:1]:
            self._watch(of_class(kind, name))

    def _watch(self, place: OuterValue) -> None:
        key = place.owner, place.name
        if key not in self._referred:
            self._referred.add(key)
            self.references.append(Reference(place, place.read()))

    def _note_generators(self, value: Any) -> bool:
        """Note the random generators in a value, and return True if there are any."""
        small = isinstance(value, (list, tuple, dict)) and len(value) <= _SMALL
        keys = value if isinstance(value, dict) else range(len(value)) if small else ()
        inner = [key for key in keys if self._note_generator(value[key])] if small else []
        for key in inner:
            read, write = functools.partial(_item, value, key), functools.partial(_put, value, key)
            self._watch(OuterValue(id(value), key, read, write))
        return bool(inner) or self._note_generator(value)

    def _note_generator(self, value: Any) -> bool:
        generator = value.__self__ if isinstance(value, _METHODS) else value
        if not is_generator(generator):
            return False
        if all(generator is not known for known in self.generators):
            self.generators.append(generator)
        return True


def changed(references: Iterable[Reference]) -> bool:
    """Return True if any name has another value than before."""
    return any(place.read() is not value for place, value in references)


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except LookupError:
        return UNKNOWN


def _put(container: Any, key: Any, value: Any) -> None:
    """Set an item, if the container still has it: one that has grown shorter keeps its length."""
    if value is not UNKNOWN and _item(container, key) is not UNKNOWN:
        container[key] = value


def _is_read_whole(function: types.FunctionType) -> bool:
    """Return True for code of the program with a name for each of its arguments."""
    return not is_trusted(function) and not function.__code__.co_flags & _STARRED


class _SideEffectReader:
    def __init__(self, effects: SideEffects, scope: Scope, path: str, depth: int) -> None:
        self._effects = effects
        self._scope = scope
        self._path = path
        self._depth = depth
        self._nodes = list(own_nodes(scope.node))
        self._outer, self._filled = scope.closes_over, filled_once(self._nodes)
        self._onto = {*map(id, map(appended_to, self._nodes))}

    def read(self) -> None:
        raises = raising(self._scope.node)
        nodes, own = self._nodes, reads_of_this_call(self._scope)
        assigned = {id(one.target) for one in nodes if isinstance(one, ast.AugAssign)}
        for node in nodes:
            if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Load):
                continue
            if node.id in self._outer and node.id not in self._filled.get(id(node), ()):
                self._wrote(f"assigns the outer name `{node.id}`", node)
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.Delete)):
                for target in node.targets:
                    self._assigned(target, node)
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
                self._assigned(node.target, node)
            elif isinstance(node, ast.Call):
                self._called(node, silent=node in raises)
            elif isinstance(node, _READS) and isinstance(node.ctx, ast.Load):
                found = self._scope.value(node)
                if id(node) not in self._onto:
                    self._effects._loads(name_of(node), found.value)
            is_read = isinstance(getattr(node, "ctx", None), ast.Load) or id(node) in assigned
            if isinstance(node, ast.Attribute) and is_read and id(node) not in own:
                self._read(ast.Constant(node.attr))
                self._effects.is_unread |= node.attr == "__dict__"

    def _read(self, name: ast.expr) -> None:
        """Note a read of an attribute by its name, or of any where the name is computed."""
        if isinstance(name, ast.Constant):
            self._effects.reads.add(str(name.value))
        else:
            self._effects.is_unread = True

    def _wrote(self, does: str, node: Any, onto: tuple[str, list[Any]] | None = None) -> None:
        self._effects.writes.append(Write(does, self._path, node.lineno, onto))

    def _assigned(self, target: ast.expr, node: Any) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for one in target.elts:
                self._assigned(one, node)
        elif isinstance(target, ast.Attribute):
            self._set_on(target.value, target, node)
            if isinstance(node, ast.AugAssign) and self._scope.value(target).value is not UNKNOWN:
                self._written(target, target, node)
        elif isinstance(target, ast.Subscript):
            self._written(target.value, target, node)
        elif isinstance(target, ast.Name) and isinstance(node, ast.AugAssign):
            name = ast.Name(id=target.id, ctx=ast.Load())
            self._written(name, target, node)

    def _set_on(self, owner: ast.expr, target: ast.expr, node: Any) -> None:
        there = self._scope.value(owner)
        if not there.outlives or self._is_own(there.value):
            return
        if isinstance(there.value, nn.Module):
            self._effects._add(there.value)
        else:
            self._wrote(f"sets `{ast.unparse(target)}`", node)

    def _written(self, owner: ast.expr, target: ast.expr, node: Any) -> None:
        there = self._scope.value(owner)
        if not there.outlives or isinstance(there.value, _IMMUTABLE) or self._is_own(there.value):
            return
        if ast.unparse(owner) not in self._filled.get(id(target), ()):
            self._wrote(f"writes to `{ast.unparse(target)}`", node)

    def _is_own(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return id(value) in self._effects._known
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            return False
        return any(
            value is held
            for module in self._effects.modules
            for held in (*module._buffers.values(), *vars(module).values())
        )

    def _called(self, call: ast.Call, *, silent: bool) -> None:
        if isinstance(call.func, ast.Attribute):
            name = call.func.attr
            self._method(call, call.func)
        else:
            name = getattr(call.func, "id", "")
            self._named(call, name, silent=silent)
        for keyword in call.keywords:
            if keyword.arg == "out":
                self._written(keyword.value, keyword.value, call)
        function = self._scope.value(call.func).value
        self._written_by_library(call, name, function)
        if isinstance(function, nn.Module):
            self._effects._add(function)
        elif function is not UNKNOWN and not isinstance(function, type):
            value = self._scope.value
            plain = itertools.takewhile(lambda one: not isinstance(one, ast.Starred), call.args)
            keywords = [(one.arg, value(one.value)) for one in call.keywords if one.arg]
            self._effects._call(function, self._depth + 1, [*map(value, plain)], keywords)

    def _written_by_library(self, call: ast.Call, name: str, function: Any) -> None:
        """Handle C functions: aliases of container methods, and functions that write to an argument."""
        owner = function.__self__ if isinstance(function, _METHODS) else None
        own = getattr(function, "__name__", "")
        if isinstance(owner, _CONTAINERS) and own in _WRITES and own != name:
            self._wrote(f"calls `{ast.unparse(call.func)}`", call)
        elif own == "__next__":
            self._wrote(f"draws from `{ast.unparse(call.func)}`", call)
        elif name in _WRITE_TO_ARGUMENT and call.args:
            self._written(call.args[0], call.args[0], call)

    def _method(self, call: ast.Call, func: ast.Attribute) -> None:
        there = self._scope.value(func.value)
        if not there.outlives or self._is_own(there.value):
            return
        name, value = func.attr, there.value
        in_place = name.endswith("_") and not name.endswith("__")
        if isinstance(value, types.ModuleType):
            if name in _SAVES or (value.__name__, name) == ("os", "putenv"):
                self._wrote(f"calls `{ast.unparse(func)}`", call)
        elif isinstance(value, torch.Tensor):
            if in_place and name != "requires_grad_":
                self._wrote(f"writes to `{ast.unparse(func.value)}`", call)
        elif name in _WRITES and not isinstance(value, nn.Module):
            if (
                value is UNKNOWN
                or function_of(getattr(type(value), name, None)) is None
                or isinstance(value, (*_CONTAINERS, collections.abc.MutableMapping))
            ):
                is_grown = type(value) is list and id(func.value) in self._onto
                onto = (name_of(func.value), value) if is_grown else None
                self._wrote(f"calls `{ast.unparse(func)}`", call, onto)
        elif in_place and value is UNKNOWN:
            self._wrote(f"writes to `{ast.unparse(func.value)}`", call)

    def _named(self, call: ast.Call, name: str, *, silent: bool) -> None:
        """Handle a call of a plain name: built-in functions that write."""
        if self._scope.is_local(name):
            return
        if name == "print" and not silent:
            self._wrote("prints", call)
        elif name == "next" and call.args:
            there = self._scope.value(call.args[0])
            if there.outlives and not isinstance(there.value, nn.Module):
                self._wrote(f"draws from `{ast.unparse(call.args[0])}`", call)
        elif name in ("getattr", "hasattr") and len(call.args) > 1:
            self._read(call.args[1])
            self._effects._loads("", self._scope.value(call).value)
        elif name == "vars":
            self._effects.is_unread = True
        elif name in ("setattr", "delattr") and call.args:
            self._set_on(call.args[0], call, call)
        elif name == "open" and opens_for_writing(call):
            self._wrote("writes a file", call)
