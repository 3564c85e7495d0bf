"""`torch.tensor(0.0, device=d)` and `torch.tensor(0.0).to(d)` become `torch.full((), 0.0, device=d)`.

`torch.tensor` makes its tensor on the host and copies it, and the copy is a host-device sync. `torch.full`
makes it on the device. The type is the same, by the same rules: integers of 64 bits, the default type for
floats. A float that is not written there may be too large for the type, which `torch.tensor` makes
infinite and `torch.full` refuses: it goes by way of 64 bits. `torch.tensor([c] * n)` is filled likewise.

With `non_blocking=True` the copy is a race, since the host's number may be gone before it is copied; this
one cannot be. Refused with `pin_memory`, and where a gradient is asked for before the move. Without a run
the source has to say that it is a number: by an annotation, a test with `isinstance`, or how it is made.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, is_number
from torchtrim.source.numbers import is_known_number
from torchtrim.source.source import Source
from torchtrim.source.uploads import Upload, need_device, uploads

_LARGEST = 3.4e38
_LISTS = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.Dict, ast.Set)
_COUNTING = ("len", "size", "numel")


def find(source: Source) -> Iterator[Match]:
    """Scalars, and lists of one number, that become tensors on a device."""
    for upload in uploads(source, frozenset(("tensor", "as_tensor"))):
        if len(upload.made.args) != 1 or upload.between:
            continue
        (value,) = upload.made.args
        parts: dict[str, ast.expr] = {"C": value}
        if isinstance(value, ast.BinOp) and isinstance(value.left, ast.List):
            if not isinstance(value.op, ast.Mult) or len(value.left.elts) != 1:
                continue
            parts = {"C": value.left.elts[0], "N": value.right}
        elif isinstance(value, (*_LISTS, ast.Starred)):
            continue
        if upload.device is not None:
            parts["D"] = upload.device
        rest = [word for word in upload.made.keywords if word.arg != "device"]
        yield Match(fix=FIX, source=source, node=upload.whole, parts=parts, keywords={"REST": rest})


def write(match: Match, facts: Facts) -> Writing:
    """The tensor made on the device."""
    source = match.source
    upload = next(
        one
        for one in uploads(source, frozenset(("tensor", "as_tensor")))
        if one.whole is match.node
    )
    words = upload.words
    _check_words(upload)
    if not _is_small(match.parts["C"]):
        facts.need(
            f"`{match.text('C')[:60]}` is a number of Python's",
            lambda v: is_number(v.C),
            told=lambda _: is_known_number(match.parts["C"], source),
        )
    if "D" in match.parts:
        need_device(facts, match.text("D"))
    size = "()"
    if "N" in match.parts:
        size = _size(match, facts, typed="dtype" in words)
    device = "D" if "D" in match.parts else '"cuda"'
    whole = facts.holds(lambda v: v.C.kind != "float")
    if not facts.seen or whole or _is_small(match.parts["C"]):
        rest = ", **REST" if words.keys() - {"device"} else ""
        return Writing(replace(match, f"torch.full({size}, C{rest}, device={device})"))
    dtype = source.segment(words["dtype"]) if "dtype" in words else "torch.get_default_dtype()"
    if "requires_grad" in words:
        raise Refused("it would have to be cast, and then it is no leaf of the gradients")
    wide = f"torch.full({size}, C, dtype=torch.float64, device={device})"
    return Writing(replace(match, f"{wide}.to({dtype})"))


def _check_words(upload: Upload) -> None:
    words = upload.words
    if set(words) - {"device", "dtype", "requires_grad"}:
        raise Refused("it uses `pin_memory`, or keywords that are not known")
    if upload.made is not upload.whole and ({"device", "requires_grad"} & set(words)):
        raise Refused("it is given a device or a gradient before it is moved")


def _size(match: Match, facts: Facts, *, typed: bool) -> str:
    """The size of the list, which no negative number makes shorter than none."""
    facts.need(f"`{match.text('N')[:60]}` is an integer", lambda v: v.N.kind == "int")
    if not typed:
        facts.need(
            "an empty one has the type of the others: it is of floats, or `dtype` is given",
            lambda v: v.C.kind == "float",
        )
    return "[N]" if _is_count(match.parts["N"]) else "[max(N, 0)]"


def _is_count(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) and node.value >= 0
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _COUNTING


def _is_small(node: ast.expr) -> bool:
    """Whether it is written as a number that is no larger than 32 bits hold."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd) and _is_small(node.operand)
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and (abs(value) < _LARGEST or not math.isfinite(value))


FIX = Fix(codes=("TT103",), equivalence="BITWISE", find=find, write=write)
