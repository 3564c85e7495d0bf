"""Tensors of values known to the host: created on the device, or uploaded without a sync."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import TypeGuard

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, of_forms
from torchtrim.rewriter.replace import added_keyword, replace
from torchtrim.source.facts import Facts, FixRefused, is_floating, is_int, is_number
from torchtrim.source.forms import match_form
from torchtrim.source.nodes import called, constant_of, find_all, method_of, name_set
from torchtrim.source.numbers import is_known_number
from torchtrim.source.source import SourceFile
from torchtrim.source.transfers import Upload, need_device, uploads

_LITERALS = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.Dict, ast.Set)
_LISTS = ("list", "tuple", "ndarray")
_LARGEST = 3.4e38
"""The largest float32, rounded down."""
_SMALL = 2**15  # the smallest types that a number may get, int16 and float16, reach this far
_MAKERS = name_set("tensor as_tensor")
_TYPED = {
    "FloatTensor": "float32",
    "DoubleTensor": "float64",
    "LongTensor": "int64",
    "IntTensor": "int32",
}
_SCALARS = frozenset((*_MAKERS, *_TYPED))
_PINNED = name_set("tensor")
_READS = name_set("item tolist cpu numpy")
_RANDOM = name_set("rand randn randint randperm normal bernoulli")
_FLOATING = name_set("linspace logspace")
_SAME = name_set("zeros ones full eye arange")
_BETWEEN = name_set("""
    float double half bfloat16 long int short bool view reshape unsqueeze squeeze expand repeat
    t flatten permute transpose
""")
_EXACT = name_set("zeros ones eye")
"""Their numbers are exact in each type."""
_MADE = _SAME | _RANDOM | _FLOATING
_CALLS = (
    "torch.tensor({}, dtype=T, device=D)",
    "torch.tensor({}, device=D, dtype=T)",
    "torch.tensor({}, device=D)",
    "torch.tensor({}).to(D)",
)
_RANGES = {
    call.format(listed): f"torch.arange(max(N, 0){', dtype=T' if 'T' in call else ''}, device=D)"
    for call in (*_CALLS, "torch.as_tensor({}, device=D)")
    for listed in ("range(N)", "list(range(N))", "[I for I in range(N)]")
}
_WHOLE = ("torch.int64", "torch.long", "torch.int32", "torch.int")
_REPEATED = {
    call.format(listed): f"torch.full([max(N, 0)], C{', dtype=T' if 'T' in call else ''}, device=D)"
    for listed in ("[C for I in range(N)]", "N * [C]")
    for call in _CALLS
}
_NEW = {
    "X.new_tensor(C)": "X.new_full((), C)",
    "X.new_tensor(C, dtype=T)": "X.new_full((), C, dtype=T)",
    "X.new_tensor(C, requires_grad=G)": "X.new_full((), C, requires_grad=G)",
}


def _of(match: Match, names: frozenset[str]) -> Upload:
    every = uploads(match.source, names, cast=True)
    return next(one for one in every if one.whole is match.node)


def _match(fix: Fix, source: SourceFile, upload: Upload, parts: dict[str, ast.expr]) -> Match:
    if upload.device is not None:
        parts["D"] = upload.device
    rest = [word for word in upload.made.keywords if word.arg != "device"]
    return Match(fix=fix, source=source, node=upload.whole, parts=parts, keywords={"REST": rest})


def _single(source: SourceFile, names: frozenset[str]) -> Iterator[tuple[Upload, ast.expr]]:
    for upload in uploads(source, names):
        if len(upload.made.args) == 1 and not upload.between:
            yield upload, upload.made.args[0]


def _is_small_constant(node: ast.expr) -> bool:
    value = constant_of(node)
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < _SMALL


def _scalars(source: SourceFile) -> Iterator[Match]:
    """Yield scalars, and lists of one repeated number, that become tensors on a device."""
    for upload, value in _single(source, _SCALARS):
        parts: dict[str, ast.expr] = {"C": value}
        if isinstance(value, ast.BinOp) and isinstance(value.left, ast.List):
            if not isinstance(value.op, ast.Mult) or len(value.left.elts) != 1:
                continue
            parts = {"C": value.left.elts[0], "N": value.right}
        elif _is_one(value) and _fits(upload.made, value.elts[0]):
            parts = {"C": value.elts[0]}
        elif isinstance(value, (*_LITERALS, ast.Starred)) or called(upload.made.func) in _TYPED:
            continue
        yield _match(SCALAR_ON_DEVICE, source, upload, parts)


def _fits(made: ast.Call, number: ast.expr) -> bool:
    """Return True unless a constructor of integers gets a float."""
    return called(made.func) not in ("LongTensor", "IntTensor") or type(constant_of(number)) is int


def _is_one(node: ast.expr) -> TypeGuard[ast.List]:
    """Return True for a list of one literal number."""
    return isinstance(node, ast.List) and len(node.elts) == 1 and _is_small(node.elts[0])


def _full(match: Match, facts: Facts) -> Writing:
    source = match.source
    upload = _of(match, _SCALARS)
    words = upload.words
    if words.keys() - {"device", "dtype", "requires_grad"}:
        raise FixRefused("it uses `pin_memory` or unknown keywords")
    if upload.made is not upload.whole and words.keys() & {"device", "requires_grad"}:
        raise FixRefused("it gets a device or a gradient before the move")
    if not _is_small(match.parts["C"]):
        facts.need(
            f"`{match.text('C')[:60]}` is a Python number",
            lambda v: is_number(v.C),
            static=lambda _: is_known_number(match.parts["C"], source),
        )
    device, size = _device(match, facts), "()"
    if "N" in match.parts:
        match.need(facts, "N", "is an integer", is_int)
        if "dtype" not in words:
            facts.need(
                "an empty one has the same type: its elements are floats, or `dtype` is given",
                lambda v: v.C.kind == "float",
            )
        size = "[N]" if _is_size(match.parts["N"]) else "[max(N, 0)]"
    if _is_one(upload.made.args[0]):
        return Writing(replace(match, _filled(match, upload, device)))
    whole = facts.holds(lambda v: v.C.kind != "float")
    if not facts.seen or whole or _is_small(match.parts["C"]):
        rest = ", **REST" if words.keys() - {"device"} else ""
        return Writing(replace(match, f"torch.full({size}, C{rest}, device={device})"))
    dtype = source.segment(words["dtype"]) if "dtype" in words else "torch.get_default_dtype()"
    if "requires_grad" in words:
        raise FixRefused("it would need a cast, and would no longer be an autograd leaf")
    wide = f"torch.full({size}, C, dtype=torch.float64, device={device})"
    return Writing(replace(match, f"{wide}.to({dtype})"))


def _filled(match: Match, upload: Upload, device: str) -> str:
    """Return the call that fills a tensor of one element, by its own name for zero and one."""
    typed = _TYPED.get(called(upload.made.func))
    rest = ", **REST" if upload.words.keys() - {"device"} else ""
    value = constant_of(match.parts["C"])
    name = ""
    if type(value) is float or "dtype" in upload.words or typed:
        name = "zeros(1" if value == 0 else "ones(1" if value == 1 else ""
    rest = f", dtype=torch.{typed}" if typed else rest
    return f"torch.{name or 'full((1,), C'}{rest}, device={device})"


def _device(match: Match, facts: Facts) -> str:
    if "D" not in match.parts:
        return '"cuda"'
    need_device(facts, match.text("D"))
    return "D"


def _is_size(node: ast.expr) -> bool:
    """Return True for a number that is never negative, by its form. A negative one gives an empty list."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    if isinstance(node, ast.Call):
        return called(node.func) in ("len", "size", "numel")
    value = constant_of(node)
    return isinstance(value, int) and value >= 0


def _is_small(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub | ast.UAdd) and _is_small(node.operand)
    value = constant_of(node)
    return isinstance(value, int | float) and (abs(value) < _LARGEST or not math.isfinite(value))


SCALAR_ON_DEVICE: Fix = Fix(
    name="scalar_on_device",
    doc="""`torch.tensor(0.0, device=d)` and `torch.tensor(0.0).to(d)` become `torch.full((), 0.0, device=d)`.

    `torch.tensor` creates its tensor on the host and copies it, and the copy is a host-device sync.
    `torch.full` creates it on the device, with the same type by the same rules: 64-bit integers, the default
    type for floats. A float that is not a literal may be too large for the type; `torch.tensor` makes it
    infinite while `torch.full` raises, so it is converted through 64 bits. `torch.tensor([c] * n)` is filled
    likewise, and `torch.tensor([0.0])` or `torch.FloatTensor([0.0])` become `torch.zeros(1, device=d)`.

    With `non_blocking=True` the copy is a race, since the host's number may be freed before it is copied; the
    replacement has no race. Refused with `pin_memory`, and if a gradient is requested before the move.
    Without a run, the source has to show that the value is a number: by an annotation, an `isinstance` test,
    or the expression that computes it.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=_scalars,
    write=_full,
)


def _new(match: Match, facts: Facts) -> Writing:
    number = match.parts["C"]
    if isinstance(number, ast.UnaryOp) and isinstance(number.op, ast.USub):
        number = number.operand
    if not _is_small_constant(number):
        raise FixRefused("its value is not a small literal number")
    match.need(facts, "X", "is a tensor of floats", is_floating)
    return Writing(replace(match, _NEW[match.form]))


NEW_NUMBER: Fix = Fix(
    name="new_number",
    doc="""`x.new_tensor(0.5)` becomes `x.new_full((), 0.5)`, which creates the tensor on the device.

    `new_tensor` creates its tensor on the host and copies it, and the host waits. Both have the type and
    device of `x`, unless the call names others.

    Needs a literal Python number that fits 32 bits.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=of_forms(lambda: NEW_NUMBER, *_NEW),
    write=_new,
)


def _repeated(match: Match, facts: Facts) -> Writing:
    bound = match_form(match.form, match.node, match.source)
    assert bound is not None
    number = bound.parts["C"]
    if not _is_small_constant(number):
        raise FixRefused("the repeated value is not a small literal number")
    if "T" not in match.parts and not isinstance(constant_of(number), float):
        raise FixRefused("an empty list would have a float type: pass `dtype`")
    match.need(facts, "N", "is an integer", is_int)
    need_device(facts, match.text("D"))
    text = match.source.segment(number)
    return Writing(replace(match, _REPEATED[match.form].replace("C", text, 1)))


REPEATED_NUMBER: Fix = Fix(
    name="repeated_number",
    doc="""`torch.tensor([0.0 for _ in range(n)], device=d)` becomes `torch.full([n], 0.0, device=d)`.

    A list becomes a tensor on the host and is copied, and the host waits. The device can fill a tensor
    itself.

    Needs a literal number, either a float or with a `dtype`: an empty list has the default float type.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=of_forms(lambda: REPEATED_NUMBER, *_REPEATED, without="CI"),
    write=_repeated,
)


def _range(match: Match, facts: Facts) -> Writing:
    match.need(facts, "N", "is an integer", is_int)
    need_device(facts, match.text("D"))
    risk = ""
    if "T" not in match.parts:
        risk = "an empty range has an integer type, an empty list a float type"
    elif match.source.dotted(match.parts["T"]) not in _WHOLE:
        risk = "a type that cannot represent all its numbers rounds differently"
    return Writing(replace(match, _RANGES[match.form]), risk=risk)


LISTED_RANGE: Fix = Fix(
    name="listed_range",
    doc="""`torch.tensor(list(range(n)), dtype=t, device=d)` becomes `torch.arange(n, dtype=t, device=d)`.

    A list becomes a tensor on the host and is copied, and the host waits. The device can count by itself.

    Without a `dtype` an empty list has a float type and an empty range an integer type, so the fix is then
    applied only with `--unsafe-fixes`.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=of_forms(lambda: LISTED_RANGE, *_RANGES, without="CI"),
    write=_range,
)


def _lists(source: SourceFile) -> Iterator[Match]:
    for upload, value in _single(source, _PINNED):
        left = value.left if isinstance(value, ast.BinOp) else None
        if _is_one(value) or (isinstance(left, ast.List) and len(left.elts) == 1):
            continue
        number = isinstance(value, ast.Call) and (
            called(value.func) in ("numel", "len", "dim", "item")
            or (called(value.func) == "size" and bool(value.args))
        )
        if not number and not isinstance(value, ast.Constant | ast.Starred):
            yield _match(PINNED_UPLOAD, source, upload, {"L": value})


def _pinned(match: Match, facts: Facts) -> Writing:
    words = {word.arg for word in match.keywords["REST"]}
    if words - {"dtype"}:
        raise FixRefused("its keywords set its memory or a gradient")
    upload = _of(match, _PINNED)
    if upload.made is not upload.whole and "device" in upload.words:
        raise FixRefused("it gets a device before the move")
    listed = match.parts["L"]
    if any(called(call.func) in _READS for call in find_all(listed, ast.Call)):
        raise FixRefused(
            "its list is read from a device, and that read waits. Look its numbers up on the device: index "
            "a tensor of them"
        )
    facts.need(
        f"`{match.text('L')[:60]}` is a list",
        lambda v: v.L.kind in _LISTS,
        static=lambda v: isinstance(listed, _LITERALS) or v.L.kind in _LISTS,
    )
    device, rest = _device(match, facts), ", **REST" if words else ""
    made = f'torch.tensor(L{rest}, device="cpu", pin_memory=torch.cuda.is_available())'
    return Writing(
        replace(match, f"{made}.to({device}, non_blocking=True)"),
        advice="" if facts.seen else _ONCE,
    )


_ONCE = "if its values are the same each time, make it once, before the loop or as a buffer; else pin it"


PINNED_UPLOAD: Fix = Fix(
    name="pinned_upload",
    doc="""`torch.tensor(numbers, device=d)` of a list is uploaded from pinned memory, without a host-device
    sync.

    A copy from pageable memory blocks until it is done. A list in pinned memory, moved with
    `non_blocking=True`, is copied while the host goes on; PyTorch keeps the pinned memory until the copy has
    finished. Without CUDA no memory is pinned and the line means the same as before.

    Without a run it is shown as a diff to copy: a tensor that is always the same is better made once. Refused
    with keywords that contradict this, if the list is read from a device itself (`x.tolist()`), and without a
    run if the source does not show that it is a list.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=_lists,
    write=_pinned,
)


def _moved(source: SourceFile) -> Iterator[Match]:
    for upload in uploads(source, _MADE, cast=True):
        if upload.whole is not upload.made:
            parts = {f"A{n}": one for n, one in enumerate(upload.made.args)}
            yield _match(MADE_ON_DEVICE, source, upload, parts)


def _made(match: Match, facts: Facts) -> Writing:
    source = match.source
    upload = _of(match, _MADE)
    name = called(upload.made.func)
    _check_making(upload, name)
    device = match.text("D") if _device(match, facts) == "D" else '"cuda"'
    if name == "arange":
        for part in (part for part in match.parts if part.startswith("A")):
            match.need(facts, part, "is an integer", is_int)
    if name == "full":
        match.need(facts, "A1", "is a Python number", is_number)
    last = upload.between[-1] if upload.between else upload.made
    move = TextEdit(source.end(last), source.end(upload.whole), "")
    cast = f"dtype={source.segment(upload.dtype)}, " if upload.dtype is not None else ""
    return Writing((added_keyword(source, upload.made, f"{cast}device={device}"), move))


def _check_making(upload: Upload, name: str) -> None:
    if name in _RANDOM:
        raise FixRefused(
            "it draws random numbers on the host; the device would draw others. Add `device=` "
            "yourself if that is acceptable"
        )
    if name in _FLOATING:
        raise FixRefused("devices round its steps differently")
    if upload.words.keys() - {"dtype"}:
        raise FixRefused("its keywords set a device, or a gradient before the move")
    if upload.dtype is not None and (name not in _EXACT or "dtype" in upload.words):
        raise FixRefused("the move casts it. Give its constructor the type")
    if name == "full" and len(upload.made.args) != 2:
        raise FixRefused("its value is not a positional argument")
    if not _BETWEEN.issuperset(map(method_of, upload.between)):
        raise FixRefused("the host computes with it before the move")
    if any(isinstance(one, ast.Starred) for one in upload.made.args) and name in ("arange", "full"):
        raise FixRefused("its arguments are ambiguous")


MADE_ON_DEVICE: Fix = Fix(
    name="made_on_device",
    doc="""`torch.zeros(n).to(d)` becomes `torch.zeros(n, device=d)`.

    The tensor is created where it is used, and not copied. Applies to values that are the same on each
    device: zeros, ones, `full`, `eye`, and `arange` of integers, also if the tensor is cast or reshaped
    before the move; of zeros, ones and `eye` also if the move casts them. Refused for random numbers, which
    would come from another device's generator, for ranges of floats, which devices round differently, with
    `pin_memory`, and if a gradient is requested before the move.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=_moved,
    write=_made,
)


FIXES = (
    LISTED_RANGE,
    MADE_ON_DEVICE,
    NEW_NUMBER,
    PINNED_UPLOAD,
    REPEATED_NUMBER,
    SCALAR_ON_DEVICE,
)
