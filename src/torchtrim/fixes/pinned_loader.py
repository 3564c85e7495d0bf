"""`batch.to(device)` of a `DataLoader`'s batch: pinned by the loader, and moved without waiting.

A copy from pageable memory blocks until it is done. The loader gets `pin_memory=torch.cuda.is_available()`
and the copy `non_blocking=True`, so that the host issues the next operators in the meantime. PyTorch keeps
pinned memory until copies from it have finished.

Refused if the batch on the host may be written to afterwards, while the copy might still read it, and if the
loader's arguments are not visible.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.replace import check_comments, torch_of
from torchtrim.source.facts import Facts, FixRefused, is_tensor, of_part
from torchtrim.source.names import is_private, loads, only_reads, stores
from torchtrim.source.source import SourceFile

_LOADER = "torch.utils.data.DataLoader"
_AROUND = ("enumerate", "tqdm", "iter", "trange", "islice")


def _find(source: SourceFile) -> Iterator[Match]:
    if not _loaders(source):
        return
    for node in source.at({(ast.Call, "to"), (ast.Call, "cuda")}):
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute) or not node.args
        name = node.func.value if isinstance(node.func, ast.Attribute) else None
        loop = source.loop(node)
        if isinstance(name, ast.Name) and isinstance(loop, ast.For) and _is_taken(name, loop):
            if any(word.arg == "non_blocking" for word in node.keywords):
                continue
            parts: dict[str, ast.expr] = {"X": name, "LOADER": _iterated(loop.iter)}
            for number, other in enumerate(_others(name, loop)):
                parts[f"B{number}"] = other
            yield Match(fix=FIX, source=source, node=node, parts=parts)


def _loaders(source: SourceFile) -> list[ast.Call]:
    return [
        node
        for node in source.at({(ast.Call, "DataLoader")})
        if isinstance(node, ast.Call) and source.dotted(node.func) == _LOADER
    ]


def _is_taken(name: ast.Name, loop: ast.For) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name.id for one in ast.walk(loop.target))


def _others(name: ast.Name, loop: ast.For) -> Iterator[ast.Name]:
    """Return the loop's other targets: the first use of each or, without one, the target itself."""
    counter = loop.target.elts[:1] if _is_counted(loop) else []  # type: ignore[attr-defined]
    for taken in ast.walk(loop.target):
        if isinstance(taken, ast.Name) and taken.id != name.id and taken not in counter:
            uses = [use for use in loads(loop, taken.id) if use.lineno > loop.lineno]
            yield min(uses, key=lambda use: (use.lineno, use.col_offset)) if uses else taken


def _is_counted(loop: ast.For) -> bool:
    call = loop.iter
    named = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    return named and call.func.id == "enumerate" and isinstance(loop.target, ast.Tuple)  # type: ignore[attr-defined]


def _iterated(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and node.args:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name not in _AROUND:
            break
        node = node.args[0]
    return node


def _write(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node
    assert isinstance(node, ast.Call)
    facts.need(
        f"`{match.text('X')}` is a tensor on the host, from a `DataLoader`",
        lambda v: is_tensor(v.X) and v.X.device == "cpu",
    )
    for part in (one for one in match.parts if one.startswith("B")):
        facts.need(
            f"`{match.text(part)}` is on the host too, or the loader cannot pin it",
            of_part(part, lambda seen: seen.device in ("", "cpu")),
        )
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
    torch, imports = torch_of(source)
    edits = [added_keyword(source, node, "non_blocking=True"), *imports]
    for loader in _its_loaders(source, match.parts["LOADER"]):
        words = {word.arg: word.value for word in loader.keywords}
        if None in words or any(isinstance(one, ast.Starred) for one in loader.args):
            raise FixRefused(
                "the arguments of its `DataLoader` are not visible here. Pass it `pin_memory=True`"
            )
        if "pin_memory" not in words:
            edits.append(added_keyword(source, loader, f"pin_memory={torch}.cuda.is_available()"))
    check_comments(source, edits)
    return Writing(tuple(edits))


def _its_loaders(source: SourceFile, iterated: ast.expr) -> list[ast.Call]:
    """Return the constructor calls of the loader. Raises `FixRefused` if it may be one of several."""
    found = _loaders(source)
    if isinstance(iterated, ast.Name):
        given = [source.parents[one] for one in stores(source.function(iterated), iterated.id)]
        own = [one for one in found if source.parents[one] in given]
        if own and len(own) == len(given):
            return own
    if len(found) > 1:
        raise FixRefused(
            "the file creates several loaders. Pass `pin_memory=True` to this one's constructor"
        )
    return found


def _is_done(source: SourceFile, name: ast.Name, move: ast.Call) -> bool:
    """Return True if the moved tensor takes the name, or the name is only read from then on."""
    statement = source.statement(move)
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if any(isinstance(one, ast.Name) and one.id == name.id for one in ast.walk(target)):
                return True
    function = source.function(move)
    later = [use for use in loads(function, name.id) if use is not name]
    return is_private(source, function, name.id) and all(only_reads(source, use) for use in later)


def added_keyword(source: SourceFile, call: ast.Call, text: str) -> TextEdit:
    """Return the edit that adds a keyword to a call."""
    given = [source.end(one) for one in (*call.args, *(word.value for word in call.keywords))]
    close = source.end(call) - 1
    if not given:
        return TextEdit(close, close, text)
    rest = source.text[max(given) : close]
    at = max(given) + (rest.rindex(")") + 1 if ")" in rest and "#" not in rest else 0)
    return TextEdit(at, at, f", {text}")


FIX = Fix(codes=("TT103",), equivalence="BITWISE", find=_find, write=_write)
