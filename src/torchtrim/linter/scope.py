"""What is known of names while the code of a file is walked, and whom to tell of waits."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torchtrim.linter.guards import Names
from torchtrim.linter.kinds import UNKNOWN, Kind, joined

Wait = Callable[[str, ast.AST], None]
Environment = dict[str, Kind]
Outside = Callable[[str], Kind]
_ARRAYS = frozenset(
    ("numpy", "scipy", "pandas", "jax", "tensorflow", "cupy", "mlx", "polars", "xarray")
)


@dataclass
class ClassFacts:
    """What the code of a class says of `self`: its attributes, and what its methods return."""

    name: str = ""
    attributes: Environment = field(default_factory=dict)
    returns: Environment = field(default_factory=dict)
    bases: tuple[ClassFacts, ...] = ()
    complete: bool = False

    def set(self, name: str, kind: Kind) -> None:
        """Note the kind assigned to an attribute, unless all were noted before."""
        if self.complete:
            return
        known = self.attributes.get(name)
        self.attributes[name] = kind if known is None else joined(known, kind)

    def attribute(self, name: str) -> Kind | None:
        """What an attribute is, here or in a class of the file that this one inherits from."""
        inherited = (base.attribute(name) for base in self.bases)
        return self.attributes.get(name) or next(filter(None, inherited), None)

    def returned(self, name: str) -> Kind | None:
        """What a method returns, by its annotation."""
        inherited = (base.returned(name) for base in self.bases)
        return self.returns.get(name) or next(filter(None, inherited), None)


@dataclass
class FileFacts:
    """What the code of a file says: its imports, its own names, and what its functions return.

    `outside` tells by its full name what a function that it imports returns.
    """

    imports: dict[str, str] = field(default_factory=dict)
    own: Environment = field(default_factory=dict)
    returns: Environment = field(default_factory=dict)
    classes: dict[str, ClassFacts] = field(default_factory=dict)
    outside: Outside = field(default=lambda full: UNKNOWN)

    @property
    def has_arrays(self) -> bool:
        """Whether it imports something else than torch whose arrays have the methods of tensors."""
        return any(full.partition(".")[0] in _ARRAYS for full in self.imports.values())


def changing(name: str) -> str:
    """What stands in an environment while a name may hold what a later line of the loop gave it."""
    return f"{name} changing"


class Scope:
    """Kinds of names. `wait` gets a row of the table of waits and a node.

    `env` are the names of the function, `this` is the class whose method it is; while `quiet` is over 0
    no device runs the code. `yields` counts the values that generators gave. `kinds`, where it is given, gets
    what each expression is.
    """

    def __init__(self, file: FileFacts, wait: Wait) -> None:
        self.file = file
        self.env: Environment = {}
        self.this: ClassFacts | None = None
        self.quiet = 0
        self.yields = 0
        self.kinds: dict[ast.AST, Kind] | None = None
        self._told = wait

    def wait(self, row: str, node: ast.AST) -> None:
        """Tell of a wait, unless no device runs this code."""
        if not self.quiet:
            self._told(row, node)

    @contextmanager
    def silent(self, on: bool = True) -> Iterator[None]:
        """Code that no device runs."""
        self.quiet += on
        try:
            yield
        finally:
            self.quiet -= on

    def narrow(self, known: Names) -> None:
        """Take over what a condition says of names; that one is a tensor where nothing else is known."""
        for name, kind in known:
            if kind.what != "tensor" or self.env.get(name, UNKNOWN) == UNKNOWN:
                self.env[name] = kind

    def dotted(self, node: ast.AST) -> str | None:
        """The full name of an imported object: `torch.nn.functional.softmax`."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.env:
            return None
        full = self.file.imports.get(node.id)
        return None if full is None else ".".join([full, *reversed(parts)])
