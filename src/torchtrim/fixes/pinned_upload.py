"""`torch.tensor(numbers, device=d)` of a list is uploaded from pinned memory, without a host-device sync.

A copy from ordinary memory waits until it is done. Made in pinned memory and moved with
`non_blocking=True`, the list is on its way while the host goes on; PyTorch keeps the pinned memory until
the copy is over. Without CUDA nothing is pinned and the line means what it meant.

Refused with keywords that say otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source
from torchtrim.source.uploads import need_device, uploads

_MAKING = frozenset(("tensor",))
_LISTS = ("list", "tuple", "ndarray")


def find(source: Source) -> Iterator[Match]:
    """Lists that become tensors on a device."""
    for upload in uploads(source, _MAKING):
        if len(upload.made.args) != 1 or upload.between:
            continue
        (value,) = upload.made.args
        if isinstance(value, ast.Constant | ast.Starred) or _is_repeated(value) or _counts(value):
            continue
        parts = {"L": value}
        if upload.device is not None:
            parts["D"] = upload.device
        rest = [word for word in upload.made.keywords if word.arg != "device"]
        yield Match(fix=FIX, source=source, node=upload.whole, parts=parts, keywords={"REST": rest})


def _is_repeated(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.BinOp) and isinstance(node.left, ast.List) and len(node.left.elts) == 1
    )


def _counts(node: ast.expr) -> bool:
    """Whether it is a number by its form: `x.numel()`, `len(x)`, `x.size(0)`."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    return name in ("numel", "len", "dim", "item") or (name == "size" and bool(node.args))


def write(match: Match, facts: Facts) -> Writing:
    """The same list, by way of pinned memory."""
    words = {word.arg for word in match.keywords["REST"]}
    if words - {"dtype"}:
        raise Refused("its keywords say where its memory is, or that it has a gradient")
    upload = next(one for one in uploads(match.source, _MAKING) if one.whole is match.node)
    if upload.made is not upload.whole and "device" in upload.words:
        raise Refused("it is given a device before it is moved")
    facts.need(f"`{match.text('L')[:60]}` is a list", lambda v: v.L.kind in _LISTS)
    if "D" in match.parts:
        need_device(facts, match.text("D"))
    device = "D" if "D" in match.parts else '"cuda"'
    rest = ", **REST" if words else ""
    pinned = 'device="cpu", pin_memory=torch.cuda.is_available()'
    return Writing(
        replace(match, f"torch.tensor(L{rest}, {pinned}).to({device}, non_blocking=True)")
    )


FIX = Fix(codes=("TT103",), equivalence="BITWISE", find=find, write=write)
