"""`torch.zeros(n).to(d)` becomes `torch.zeros(n, device=d)`.

The tensor is made where it is used, and not copied. Holds for what is the same on each device: zeros,
ones, `full`, `eye`, and `arange` of integers, also where it is cast or reshaped before it is moved.
Refused for random numbers, whose stream would be another device's, and for ranges of floats, which devices
round differently; with `pin_memory`, and where a gradient is asked for before the move.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import check_comments
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source
from torchtrim.source.uploads import Upload, need_device, uploads

_RANDOM = frozenset(["rand", "randn", "randint", "randperm", "normal", "bernoulli"])
_FLOATING = frozenset(("linspace", "logspace"))
_SAME = frozenset(("zeros", "ones", "full", "eye", "arange"))
_BETWEEN_NAMES = """
    float double half bfloat16 long int short bool view reshape unsqueeze squeeze expand repeat
    t flatten permute transpose
"""
_BETWEEN = frozenset(_BETWEEN_NAMES.split())


def find(source: Source) -> Iterator[Match]:
    """Tensors that are made on the host and moved at once."""
    for upload in uploads(source, _SAME | _RANDOM | _FLOATING):
        if upload.whole is upload.made:
            continue
        parts: dict[str, ast.expr] = {f"A{n}": one for n, one in enumerate(upload.made.args)}
        if upload.device is not None:
            parts["D"] = upload.device
        yield Match(fix=FIX, source=source, node=upload.whole, parts=parts)


def write(match: Match, facts: Facts) -> Writing:
    """The same making with a device, and no move."""
    source = match.source
    upload = next(
        one for one in uploads(source, _SAME | _RANDOM | _FLOATING) if one.whole is match.node
    )
    _check(upload)
    if "D" in match.parts:
        need_device(facts, match.text("D"))
    if _name(upload) == "arange":
        for part in (name for name in match.parts if name.startswith("A")):
            facts.need(
                f"`{match.text(part)[:60]}` is an integer",
                lambda v, part=part: getattr(v, part).kind == "int",  # type: ignore[misc]
            )
    if _name(upload) == "full":
        facts.need(
            f"`{match.text('A1')[:60]}` is a number of Python's",
            lambda v: v.A1.kind in ("int", "float", "bool"),
        )
    device = match.text("D") if "D" in match.parts else '"cuda"'
    last = upload.between[-1] if upload.between else upload.made
    at, comma = _after_arguments(source, upload.made)
    edits = (
        Edit(at, at, f"{comma}device={device}"),
        Edit(source.end(last), source.end(upload.whole), ""),
    )
    check_comments(source, edits)
    return Writing(edits)


def _after_arguments(source: Source, call: ast.Call) -> tuple[int, str]:
    """Where one more argument can be written, and what divides it from the last."""
    close = source.end(call) - 1
    given = [source.end(one) for one in (*call.args, *(word.value for word in call.keywords))]
    if not given:
        return close, ""
    rest = source.text[max(given) : close]
    if "#" not in rest and ")" in rest:
        return max(given) + rest.rindex(")") + 1, ", "
    return max(given), ", "


def _check(upload: Upload) -> None:
    name = _name(upload)
    if name in _RANDOM:
        raise Refused(
            "it draws random numbers on the host; on the device they would be others. Say `device=` "
            "yourself if any will do"
        )
    if name in _FLOATING:
        raise Refused("devices round its steps differently")
    if set(upload.words) - {"dtype"}:
        raise Refused(
            "its keywords say where it is made, or that it has a gradient before it is moved"
        )
    if name == "full" and len(upload.made.args) != 2:
        raise Refused("its value is not given by position")
    methods = {one.func.attr for one in upload.between if isinstance(one.func, ast.Attribute)}
    if methods - _BETWEEN:
        raise Refused("something is computed of it on the host before it is moved")
    if any(isinstance(one, ast.Starred) for one in upload.made.args) and name in ("arange", "full"):
        raise Refused("its arguments cannot be told apart")


def _name(upload: Upload) -> str:
    function = upload.made.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


FIX = Fix(codes=("TT103",), equivalence="BITWISE", find=find, write=write)
