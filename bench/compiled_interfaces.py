"""The private interfaces of torch that plans of compiled graphs need, in the sources of other versions.

    pip download torch==2.12.0 --no-deps --only-binary=:all: --platform macosx_14_0_arm64
    python -m bench.compiled_interfaces WHEEL ...

A wheel is read, not installed or run: a version without a CPU wheel for this machine has one for another,
with the same Python. Each interface is there or missing, with the parameters of this torch or other ones.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import zipfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from bench.machine import save, saved
from torchtrim.compiled.inductor import NEEDED


def found_in(wheel: str) -> dict[str, str]:
    """What a wheel has otherwise than this torch, by interface."""
    with zipfile.ZipFile(wheel) as opened:
        return {
            f"{owner.__name__}.{name}": said
            for owner, name in NEEDED
            if (said := _differs(opened, owner, name))
        }


def _differs(wheel: zipfile.ZipFile, owner: Any, name: str) -> str:
    module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    here, there = inspect.getsource(inspect.getmodule(owner) or owner), ""
    try:
        there = wheel.read(f"{module.replace('.', '/')}.py").decode()
    except KeyError:
        return "its file is missing"
    inside = "" if isinstance(owner, ModuleType) else owner.__name__
    mine, other = (_parameters(source, inside, name) for source in (here, there))
    if other is None:
        return "missing"
    return "" if mine == other else f"takes {other or 'nothing'}, here {mine or 'nothing'}"


def _parameters(source: str, inside: str, name: str) -> str | None:
    """The parameters of a function, nothing for another name, or None if there is none."""
    body: list[ast.stmt] = ast.parse(source).body
    if inside:
        body = next(
            (one.body for one in body if isinstance(one, ast.ClassDef) and one.name == inside), []
        )
    for one in body:
        if isinstance(one, ast.FunctionDef) and one.name == name:
            every = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
            return ", ".join(each.arg for each in every)
        if name in _assigned(one):
            return ""
    return None


def _assigned(statement: ast.stmt) -> Iterator[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    yield from (one.id for one in targets if isinstance(one, ast.Name))


def main() -> None:
    """Each named wheel; keeps the results of others."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled_interfaces")
    parser.add_argument("wheels", nargs="+")
    versions = saved("compiled_interfaces").get("versions", {})
    for wheel in parser.parse_args().wheels:
        version = wheel.rpartition("torch-")[2].split("-")[0]
        versions[version] = {"interfaces": len(NEEDED), "otherwise": found_in(wheel)}
        print(version, versions[version])
    save("compiled_interfaces", {"versions": versions})


if __name__ == "__main__":
    main()
