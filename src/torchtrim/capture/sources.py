"""Runs user files with another text than they have on disk, or with probes in them.

What is on disk stays as it is. A traceback names the file's own lines.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import linecache
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torchtrim.capture.probes import Probes


class Sources:
    """The texts that stand in for files, by absolute path, and the probes of a run."""

    def __init__(self, texts: Mapping[str, str], probes: Probes, probed: Sequence[str]) -> None:
        self._texts = dict(texts)
        self._probes = probes
        self._files = {*texts, *probed}
        self._finder = _Finder(self)

    def install(self) -> None:
        """From now on, imports see them."""
        for path, text in self._texts.items():
            lines = text.splitlines(keepends=True)
            linecache.cache[path] = (len(text), None, lines, path)
        if self._files:
            sys.meta_path.insert(0, self._finder)
            self._probes.install()

    def covers(self, path: str) -> bool:
        """Whether the file is run with another text or probes."""
        return path in self._files

    def code(self, path: str) -> CodeType:
        """The file's code, as it is run."""
        text = self._texts.get(path)
        data: str | bytes = Path(path).read_bytes() if text is None else text
        tree = self._probes.instrument(path, ast.parse(data, filename=path))
        return compile(tree, path, "exec", dont_inherit=True)

    def run(self, path: str) -> None:
        """Run a file as the script, as `python` would."""
        module = ModuleType("__main__")
        module.__file__ = path
        module.__dict__["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = module
        exec(self.code(path), module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        origin = str(Path(spec.origin).resolve())
        if not self._sources.covers(origin):
            return None
        spec.loader = _Loader(fullname, origin, self._sources)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, sources: Sources) -> None:
        super().__init__(fullname, path)
        self._sources = sources

    def get_code(self, fullname: str) -> Any:
        return self._sources.code(self.path)
