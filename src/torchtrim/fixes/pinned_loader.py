"""`batch.to(device)` of a `DataLoader`'s batch: pinned by the loader, and moved without waiting.

A copy from pageable memory blocks until it is done. The loader gets `pin_memory=True` and the copy
`non_blocking=True`, so that the host issues the next operators in the meantime. PyTorch keeps pinned memory
until copies from it have finished. Without a GPU it warns, and pins nothing.

Refused if the batch on the host may be written to afterwards, while the copy might still read it, and if the
loader's arguments are not visible.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.replace import added_keyword
from torchtrim.source.facts import Facts, FixRefused, is_tensor
from torchtrim.source.names import is_private, loads, only_reads, stores
from torchtrim.source.nodes import called, find_all, function_of, keywords_of, names_in
from torchtrim.source.source import SourceFile

_LOADER = "torch.utils.data.DataLoader"
_AROUND = ("enumerate", "tqdm", "iter", "trange", "islice")


def _find(source: SourceFile) -> Iterator[Match]:
    if not _loaders(source):
        return
    for node in source.calls("to", "cuda"):
        name, loop = getattr(node.func, "value", None), source.loop(node)
        if not isinstance(name, ast.Name) or not isinstance(loop, ast.For):
            continue
        if name.id in names_in(loop.target) and "non_blocking" not in keywords_of(node):
            loader = loop.iter
            while isinstance(loader, ast.Call) and loader.args and called(loader.func) in _AROUND:
                loader = loader.args[0]
            parts: dict[str, ast.expr] = {"X": name, "LOADER": loader}
            parts |= {f"B{number}": other for number, other in enumerate(_others(name, loop))}
            yield Match(fix=FIX, source=source, node=node, parts=parts)


def _loaders(source: SourceFile) -> list[ast.Call]:
    return [node for node in source.calls("DataLoader") if source.dotted(node.func) == _LOADER]


def _others(name: ast.Name, loop: ast.For) -> Iterator[ast.Name]:
    """Return the loop's other targets: the first use of each or, without one, the target itself."""
    counted = function_of(loop.iter) == "enumerate"
    counter = loop.target.elts[:1] if counted and isinstance(loop.target, ast.Tuple) else []
    for target in find_all(loop.target, ast.Name):
        if target.id != name.id and target not in counter:
            uses = [use for use in loads(loop, target.id) if use.lineno > loop.lineno]
            yield min(uses, key=lambda use: (use.lineno, use.col_offset), default=target)


def _write(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    facts.need(
        f"`{match.text('X')[:60]}` is a tensor on the host, from a `DataLoader`",
        lambda v: is_tensor(v.X) and v.X.device == "cpu",
    )
    for part in (part for part in match.parts if part.startswith("B")):
        claim = "is on the host too, or the loader cannot pin it"
        match.need(facts, part, claim, lambda seen: seen.device in ("", "cpu"))
    if not facts.holds(lambda v: not hasattr(v, "LOADER") or v.LOADER.kind == "DataLoader"):
        if facts.seen:
            raise FixRefused(
                f"`{match.text('LOADER')[:60]}` is not a `DataLoader`, and may reuse its memory"
            )
        facts.leave_open(f"`{match.text('LOADER')[:60]}` is a `DataLoader`")
    name = match.parts["X"]
    assert isinstance(name, ast.Name)
    if not _is_done(source, name, node):
        raise FixRefused(
            f"`{name.id}` is used after the move, and may be written to during the copy"
        )
    edits = [added_keyword(source, node, "non_blocking=True")]
    for loader in _its_loaders(source, match.parts["LOADER"]):
        words = keywords_of(loader)
        if None in words or any(isinstance(one, ast.Starred) for one in loader.args):
            raise FixRefused(
                "the arguments of its `DataLoader` are not visible here. Pass it `pin_memory=True`"
            )
        if "pin_memory" not in words:
            edits.append(added_keyword(source, loader, "pin_memory=True"))
    return Writing(tuple(edits))


def _its_loaders(source: SourceFile, iterated: ast.expr) -> list[ast.Call]:
    """Return the constructor calls of the loader. Raises `FixRefused` if it may be one of several."""
    every = _loaders(source)
    if isinstance(iterated, ast.Name):
        assigned = [source.parents[one] for one in stores(source.function(iterated), iterated.id)]
        own = [loader for loader in every if source.parents[loader] in assigned]
        if own and len(own) == len(assigned):
            return own
    if len(every) > 1:
        raise FixRefused(
            "the file creates several loaders. Pass `pin_memory=True` to this one's constructor"
        )
    return every


def _is_done(source: SourceFile, name: ast.Name, move: ast.Call) -> bool:
    """Return True if the moved tensor takes the name, or the name is only read from then on."""
    statement, function = source.statement(move), source.function(move)
    if isinstance(statement, ast.Assign) and any(name.id in names_in(t) for t in statement.targets):
        return True
    later = [use for use in loads(function, name.id) if use is not name]
    return is_private(source, function, name.id) and all(only_reads(source, use) for use in later)


FIX = Fix(codes=("TT103",), equivalence="BITWISE", find=_find, write=_write)
