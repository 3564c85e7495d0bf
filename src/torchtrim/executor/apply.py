"""Apply a plan to live modules, completely or not at all."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from torchtrim.capture.optimizers import names_of
from torchtrim.core.isolation import TO_REPORT, said_of, trace_of
from torchtrim.errors import ApplyFailed, TorchtrimError, UsageError, is_out_of_memory
from torchtrim.executor.failing import defect, note
from torchtrim.executor.places import root_of
from torchtrim.executor.registry import Handle, Handles, Replaces, check_known, names, technique
from torchtrim.records.plan import Plan, Technique

if TYPE_CHECKING:
    from torchtrim.executor.registry import Root


def fingerprint_of(root: nn.Module) -> str:
    """Return a hash of each module's path and type and each parameter's and buffer's shape and dtype."""
    digest = hashlib.sha256()
    for path, module in root.named_modules():
        digest.update(f"{path}:{type(module).__name__}\n".encode())
    for path, tensor in (*root.named_parameters(), *root.named_buffers()):
        shape = "lazy" if is_lazy(tensor) else tuple(tensor.shape)
        digest.update(f"{path}:{shape}:{tensor.dtype}\n".encode())
    return digest.hexdigest()[:16]


def sha256_of(script: Path) -> str:
    """Return the hash of the script's bytes."""
    return hashlib.sha256(script.read_bytes()).hexdigest()


def digest_of(script: Path) -> str:
    """Return the hashes of the script's bytes and of its code, joined by a dot.

    Comments, docstrings and formatting do not count. A file that does not parse has only the first hash.
    """
    try:
        tree = ast.parse(script.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        code = ast.dump(tree).encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return sha256_of(script)
    return f"{sha256_of(script)}.{hashlib.sha256(code).hexdigest()}"


def is_unchanged(script: Path, digest: str) -> bool:
    """Return True if the script has the bytes or the code that a digest was made from."""
    return not {*digest.split(".")}.isdisjoint(digest_of(script).split("."))


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def apply_to_its_own(plan: Plan, roots: Iterable[Root]) -> Handles:
    """Apply a plan to the roots it was made for. Raises `ApplyFailed` for other roots."""
    if plan.pipeline is not None:
        raise ApplyFailed(
            "the plan is a pipeline of several processes, and a live model runs in one. Run the script with "
            "torchrun: `torchtrim run SCRIPT --plan PLAN` prints the command."
        )
    named = named_roots(roots)
    for name, root in named.items():
        known = plan.fingerprint.get(name)
        if known is not None and isinstance(root, nn.Module) and known != fingerprint_of(root):
            raise ApplyFailed(f"the plan was made for another {name}. Plan again for this one.")
    return apply_plan(plan, named)


def named_roots(roots: Iterable[Root]) -> dict[str, Root]:
    """Name modules by their class and optimizers by `capture.optimizers`."""
    every = list(roots)
    optimizers = [root for root in every if isinstance(root, torch.optim.Optimizer)]
    modules = {type(root).__name__: root for root in every if isinstance(root, nn.Module)}
    return {**modules, **dict(zip(names_of(optimizers), optimizers, strict=True))}


def apply_plan(plan: Plan, roots: Mapping[str, Root], *, by_hand: bool = False) -> Handles:
    """Apply every technique to these roots. Raises `ApplyFailed` and leaves the roots unchanged.

    `by_hand`: make the replacements of SEMANTIC techniques by hand-written code, for comparison. Places of
    other roots are skipped; they are applied when those roots appear.
    """
    applied = Handles()
    try:
        for chosen in sorted(plan.techniques, key=_order):
            where = tuple(w for w in chosen.where if root_of(w) in roots)
            if where:
                applied.add(_applied(replace(chosen, where=where), roots, by_hand))
    except Exception:
        applied.revert()
        raise
    return applied


def _order(one: Technique) -> tuple[bool, bool]:
    """Return the order of a technique: ranges replace a Sequential's forward, which others then wrap.

    Last come those that save nothing under the hooks of others.
    """
    has_range = any(where.endswith("]") for where in one.where)
    is_known = one.name in names()
    return not has_range, is_known and getattr(technique(one.name), "goes_around", False)


def _applied(one: Technique, roots: Mapping[str, Root], by_hand: bool) -> Handle:
    try:
        unit = technique(one.name)
        check_known(one)
        if by_hand and isinstance(unit, Replaces):
            return unit.by_hand(roots, one)
        return unit.apply(roots, one)
    except UsageError as error:
        raise ApplyFailed(str(error)) from error
    except TorchtrimError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        refused = ApplyFailed(
            "the plan could not be applied, and the model is unchanged: "
            f"{one.name} raised {said_of(error)}.\nIf you edited the plan, check its entry for "
            f"{one.name}. If not: {TO_REPORT}{trace_of(error)}"
        )
        note(refused, defect(one.name))
        raise refused from error


def shards(plan: Plan | None) -> bool:
    """Return True if the plan shards state over the ranks."""
    return plan is not None and any(one.name == "shard" for one in plan.techniques)
