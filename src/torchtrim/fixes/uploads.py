"""Tensors of what the host knows, made on the device or uploaded from pinned memory, without a sync."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace as changed

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import check_comments, replace
from torchtrim.source.facts import Facts, Refused, is_floating, is_number
from torchtrim.source.forms import match_form
from torchtrim.source.numbers import is_known_number
from torchtrim.source.source import Source
from torchtrim.source.uploads import Upload, need_device, uploads

_LITERALS = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.Dict, ast.Set)
_LISTS = ("list", "tuple", "ndarray")
_COUNTING = ("len", "size", "numel")
_LARGEST = 3.4e38
_SMALL = 2**15
_MAKERS = frozenset(("tensor", "as_tensor"))
_PINNED = frozenset(("tensor",))
_RANDOM = frozenset(["rand", "randn", "randint", "randperm", "normal", "bernoulli"])
_FLOATING = frozenset(("linspace", "logspace"))
_SAME = frozenset(("zeros", "ones", "full", "eye", "arange"))
_BETWEEN_NAMES = """
    float double half bfloat16 long int short bool view reshape unsqueeze squeeze expand repeat
    t flatten permute transpose
"""
_BETWEEN = frozenset(_BETWEEN_NAMES.split())
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
    """The upload that a match is of."""
    return next(one for one in uploads(match.source, names) if one.whole is match.node)


def _match(fix: Fix, source: Source, upload: Upload, parts: dict[str, ast.expr]) -> Match:
    """The match of an upload, with where it goes, and the keywords that do not say that."""
    if upload.device is not None:
        parts["D"] = upload.device
    rest = [word for word in upload.made.keywords if word.arg != "device"]
    return Match(fix=fix, source=source, node=upload.whole, parts=parts, keywords={"REST": rest})


def _single(source: Source, names: frozenset[str]) -> Iterator[tuple[Upload, ast.expr]]:
    """The uploads of one value, and that value."""
    for upload in uploads(source, names):
        if len(upload.made.args) == 1 and not upload.between:
            yield upload, upload.made.args[0]


def _is_small_constant(node: ast.expr) -> bool:
    """Whether it is a number of few digits that is written there."""
    value = node.value if isinstance(node, ast.Constant) else None
    return type(value) in (int, float) and abs(value) < _SMALL  # type: ignore[arg-type]


def _without(match: Match, *names: str) -> Match:
    """The match without some parts: what is inside of a list is not watched with what is around it."""
    parts = {name: part for name, part in match.parts.items() if name not in names}
    return changed(match, parts=parts)


def _scalars(source: Source) -> Iterator[Match]:
    """Scalars, and lists of one number, that become tensors on a device."""
    for upload, value in _single(source, _MAKERS):
        parts: dict[str, ast.expr] = {"C": value}
        if isinstance(value, ast.BinOp) and isinstance(value.left, ast.List):
            if not isinstance(value.op, ast.Mult) or len(value.left.elts) != 1:
                continue
            parts = {"C": value.left.elts[0], "N": value.right}
        elif isinstance(value, (*_LITERALS, ast.Starred)):
            continue
        yield _match(SCALAR_ON_DEVICE, source, upload, parts)


def _full(match: Match, facts: Facts) -> Writing:
    """The tensor made on the device."""
    source = match.source
    upload = _of(match, _MAKERS)
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


SCALAR_ON_DEVICE: Fix = Fix(
    name="scalar_on_device",
    doc="""`torch.tensor(0.0, device=d)` and `torch.tensor(0.0).to(d)` become `torch.full((), 0.0, device=d)`.

    `torch.tensor` makes its tensor on the host and copies it, and the copy is a host-device sync.
    `torch.full` makes it on the device. The type is the same, by the same rules: integers of 64 bits, the
    default type for floats. A float that is not written there may be too large for the type, which
    `torch.tensor` makes infinite and `torch.full` refuses: it goes by way of 64 bits. `torch.tensor([c] *
    n)` is filled likewise.

    With `non_blocking=True` the copy is a race, since the host's number may be gone before it is copied;
    this one cannot be. Refused with `pin_memory`, and where a gradient is asked for before the move. Without
    a run the source has to say that it is a number: by an annotation, a test with `isinstance`, or how it is
    made.""",
    codes=("TT103",),
    equivalence="BITWISE",
    find=_scalars,
    write=_full,
)


def _new(match: Match, facts: Facts) -> Writing:
    """The number made on the device."""
    number = match.parts["C"]
    turned = isinstance(number, ast.UnaryOp) and isinstance(number.op, ast.USub)
    if not _is_small_constant(number.operand if turned else number):  # type: ignore[attr-defined]
        raise Refused("what it is made of is not a small number that is written there")
    facts.need(f"`{match.text('X')[:60]}` is a tensor of floats", lambda v: is_floating(v.X))
    return Writing(replace(match, _NEW[match.form]))


NEW_NUMBER: Fix = Fix(
    name="new_number",
    doc="""`x.new_tensor(0.5)` becomes `x.new_full((), 0.5)`, which the device makes itself.

    `new_tensor` makes its tensor on the host and copies it, and the host waits. Both have the type and the
    device of `x`, unless the call names another.

    Needs a number of Python's that is written there, and no larger than 32 bits hold.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=of_forms(lambda: NEW_NUMBER, *_NEW),
    write=_new,
)


def _repeated_numbers(source: Source) -> Iterator[Match]:
    """Lists of one number that become tensors."""
    for match in of_forms(lambda: REPEATED_NUMBER, *_REPEATED)(source):
        yield _without(match, "C", "I")


def _repeated(match: Match, facts: Facts) -> Writing:
    """The tensor filled on the device."""
    bound = match_form(match.form, match.node, match.source)
    assert bound is not None
    number = bound.parts["C"]
    if not _is_small_constant(number):
        raise Refused("the repeated value is not a small number that is written there")
    if "T" not in match.parts and not isinstance(number.value, float):  # type: ignore[attr-defined]
        raise Refused("an empty list would be of floats: give `dtype`")
    facts.need(f"`{match.text('N')[:60]}` is an integer", lambda v: v.N.kind == "int")
    need_device(facts, match.text("D"))
    text = match.source.segment(number)
    return Writing(replace(match, _REPEATED[match.form].replace("C", text, 1)))


REPEATED_NUMBER: Fix = Fix(
    name="repeated_number",
    doc="""`torch.tensor([0.0 for _ in range(n)], device=d)` becomes `torch.full([n], 0.0, device=d)`.

    A list is made a tensor on the host and copied, and the host waits. The device fills one itself.

    Needs a number that is written there, of floats or with a `dtype`: an empty list has the type of floats.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=_repeated_numbers,
    write=_repeated,
)


def _ranges(source: Source) -> Iterator[Match]:
    """Ranges that become tensors."""
    for match in of_forms(lambda: LISTED_RANGE, *_RANGES)(source):
        yield _without(match, "I")


def _range(match: Match, facts: Facts) -> Writing:
    """The range on the device."""
    facts.need(f"`{match.text('N')[:60]}` is an integer", lambda v: v.N.kind == "int")
    need_device(facts, match.text("D"))
    risk = ""
    if "T" not in match.parts:
        risk = "of an empty range it is of integers, and was of floats"
    elif match.source.dotted(match.parts["T"]) not in _WHOLE:
        risk = "a type that cannot count so far rounds in another way"
    return Writing(replace(match, _RANGES[match.form]), risk=risk)


LISTED_RANGE: Fix = Fix(
    name="listed_range",
    doc="""`torch.tensor(list(range(n)), dtype=t, device=d)` becomes `torch.arange(n, dtype=t, device=d)`.

    A list is made a tensor on the host and copied, and the host waits. The device counts itself.

    Without a `dtype` an empty list has the type of floats and an empty range that of integers, so such a
    call is changed only where it is asked for.""",
    codes=("TT103",),
    equivalence="BITWISE",
    find=_ranges,
    write=_range,
)


def _lists(source: Source) -> Iterator[Match]:
    """Lists that become tensors on a device."""
    for upload, value in _single(source, _PINNED):
        plain = isinstance(value, ast.Constant | ast.Starred)
        if not plain and not _is_repeated(value) and not _counts(value):
            yield _match(PINNED_UPLOAD, source, upload, {"L": value})


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


def _pinned(match: Match, facts: Facts) -> Writing:
    """The same list, by way of pinned memory."""
    words = {word.arg for word in match.keywords["REST"]}
    if words - {"dtype"}:
        raise Refused("its keywords say where its memory is, or that it has a gradient")
    upload = _of(match, _PINNED)
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


PINNED_UPLOAD: Fix = Fix(
    name="pinned_upload",
    doc="""`torch.tensor(numbers, device=d)` of a list is uploaded from pinned memory, without a
    host-device sync.

    A copy from ordinary memory waits until it is done. Made in pinned memory and moved with
    `non_blocking=True`, the list is on its way while the host goes on; PyTorch keeps the pinned memory until
    the copy is over. Without CUDA nothing is pinned and the line means what it meant.

    Refused with keywords that say otherwise.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=_lists,
    write=_pinned,
)


def _moved(source: Source) -> Iterator[Match]:
    """Tensors that are made on the host and moved at once."""
    for upload in uploads(source, _MADE):
        if upload.whole is not upload.made:
            parts = {f"A{n}": one for n, one in enumerate(upload.made.args)}
            yield _match(MADE_ON_DEVICE, source, upload, parts)


def _made(match: Match, facts: Facts) -> Writing:
    """The same making with a device, and no move."""
    source = match.source
    upload = _of(match, _MADE)
    _check_making(upload)
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


def _check_making(upload: Upload) -> None:
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


MADE_ON_DEVICE: Fix = Fix(
    name="made_on_device",
    doc="""`torch.zeros(n).to(d)` becomes `torch.zeros(n, device=d)`.

    The tensor is made where it is used, and not copied. Holds for what is the same on each device: zeros,
    ones, `full`, `eye`, and `arange` of integers, also where it is cast or reshaped before it is moved.
    Refused for random numbers, whose stream would be another device's, and for ranges of floats, which
    devices round differently; with `pin_memory`, and where a gradient is asked for before the move.""",
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
