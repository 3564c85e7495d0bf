"""Numbers that are read only to be given back to the device: the tensor itself takes their place."""

from __future__ import annotations

import re

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.guarded import for_kinds_seen, for_names_seen, with_names
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, Values, is_floating, is_tensor
from torchtrim.source.names import stays
from torchtrim.source.reads import bare
from torchtrim.source.uploads import need_device
from torchtrim.syncs.lookup import is_from


def _need_stays(match: Match, part: str) -> None:
    """The tensor must not be written to once its number was read."""
    tensor = bare(match.parts[part])
    if not stays(match.source, tensor, match.source.statement(match.node)):
        raise Refused(f"`{match.text(part)[:60]}` may be written to afterwards. Use `.clone()`")


def _wants_gradient(facts: Facts, part: str) -> bool:
    """Whether a gradient would flow through the tensor, or may where no run was watched."""
    graded = (hasattr(v, part) and getattr(v, part).requires_grad for v in facts.executions)
    return any(graded) or not facts.seen


_SUMS = {
    "X.sub(Y, alpha=P)": "X - Y * P",
    "X.add(Y, alpha=P)": "X + Y * P",
    "torch.sub(X, Y, alpha=P)": "X - Y * P",
    "torch.add(X, Y, alpha=P)": "X + Y * P",
    "X.sub_(Y, alpha=P)": "X.sub_(Y * P)",
    "X.add_(Y, alpha=P)": "X.add_(Y * P)",
}
_ALPHAS = {
    form.replace("alpha=P", f"alpha={read}"): template
    for form, template in _SUMS.items()
    for read in ("P.item()", "float(P)", "P")
}


def _as_product(match: Match, facts: Facts) -> Writing:
    """The sum or difference with a product."""
    facts.need(
        f"`{match.text('P')[:60]}` is a tensor of zero dimensions",
        lambda v: is_tensor(v.P) and is_floating(v.P) and not v.P.shape,
    )
    facts.need("the product is of the type of both tensors, on their device", _keeps_type)
    _need_stays(match, "P")
    template = _ALPHAS[match.form]
    if _wants_gradient(facts, "P"):
        template = re.sub(r"\bP\b", "P.detach()", template)
    return Writing(for_names_seen(match, facts, replace(match, template)))


def _keeps_type(values: Values) -> bool:
    first, second, number = values.X, values.Y, values.P
    wide = second.dtype in ("float32", "float64") and bool(second.shape)
    return (
        is_floating(first)
        and first.dtype == second.dtype
        and first.device == second.device == number.device
        and (number.dtype == second.dtype or wide)
    )


DEVICE_ALPHA: Fix = Fix(
    name="device_alpha",
    doc="""`g.sub(w, alpha=p)` with a tensor `p` of the device becomes `g - w * p`.

    `alpha` is a number of the host, so a tensor that is given for it is read, without a word. As a product
    it stays on the device. The product is rounded once more than the fused form.

    Refused where the product would be of another type than `w`, and where `p` may be written to afterwards.
    """,
    codes=("TT101",),
    equivalence="ROUNDING",
    find=with_names(of_forms(lambda: DEVICE_ALPHA, *_ALPHAS)),
    write=_as_product,
)


_NAMED = ("clamp(X, max=N)", "clamp(X, min=N)", "clip(X, max=N)", "clip(X, min=N)")
_METHODS = (
    *(
        f"X.{name}({word}=N)"
        for name in ("clamp", "clip", "clamp_", "clip_")
        for word in ("min", "max")
    ),
    *(
        f"X.{name}(N)"
        for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "fill_")
    ),
    "X.masked_fill(M, N)",
    "X.masked_fill_(M, N)",
)
_FUNCTIONS = (
    *(f"torch.{name}" for name in _NAMED),
    *(f"torch.{name}(X, N)" for name in ("add", "sub", "mul", "div")),
    "torch.masked_fill(X, M, N)",
    "torch.where(M, X, N)",
    "torch.where(M, N, X)",
)
_TEMPLATES = (*_METHODS, *_FUNCTIONS)
_ARGUMENTS = [
    template.replace("N)", f"{read})").replace("N,", f"{read},")
    for template in _TEMPLATES
    for read in ("N.item()", "float(N)")
]


def _as_argument(match: Match, facts: Facts) -> Writing:
    """The same call, with the tensor."""
    facts.need(
        f"`{match.text('N')[:60]}` is a tensor of zero dimensions, of the type and device of "
        f"`{match.text('X')[:60]}`",
        lambda v: (
            is_floating(v.X)
            and is_floating(v.N)
            and not v.N.shape
            and (v.N.dtype, v.N.device) == (v.X.dtype, v.X.device)
        ),
    )
    if any(name in match.form for name in ("clamp", "clip")) and is_from("2.14"):
        facts.need(
            f"`{match.text('X')[:60]}` wants no gradient: at its bound it is another for a tensor",
            lambda v: not v.X.requires_grad,
        )
    _need_stays(match, "N")
    given = "N.detach()" if _wants_gradient(facts, "N") else "N"
    read = "float(N)" if "float(N)" in match.form else "N.item()"
    floats = " and N.is_floating_point()" if read == "float(N)" else ""
    chosen = f"{given} if N.dtype == X.dtype{floats} and not N.dim() else {read}"
    template = match.form.replace(read, chosen)
    return Writing(replace(match, template, {"X": "values", "N": "number"}))


DEVICE_ARGUMENT: Fix = Fix(
    name="device_argument",
    doc="""`x.clamp(max=t.item())`, `x.masked_fill(m, t.item())`, `x.mul(t.item())` take the tensor itself.

    Each of these functions takes a tensor of zero dimensions for the number, and then nothing is read. The
    tensor must be of the type of `x`, so that the result is too, and lie on its device: its type and
    dimensions are tested, which needs no sync, and for others it is read. It is detached, as the number was.
    A device divides by a number of the host as a multiplication by its reciprocal, so a quotient may differ
    in its last bit.

    Refused where the tensor may be written to afterwards, since backward would see it; and, from torch 2.14
    on, a bound where a gradient is wanted: at an element that equals it a tensor and a number have other
    gradients.""",
    codes=("TT101",),
    equivalence="ROUNDING",
    find=of_forms(lambda: DEVICE_ARGUMENT, *_ARGUMENTS),
    write=_as_argument,
)


_READS = ("X.item()", "X.detach().item()", "float(X)", "X.cpu().item()")
_REMAKING = {
    "torch.tensor({}, dtype=T, device=D)": "T",
    "torch.tensor({}, device=D, dtype=T)": "T",
    "torch.tensor({}, device=D)": "",
    "torch.tensor({}).to(D)": "",
    "torch.as_tensor({}, device=D)": "",
}
_FLOATS = ("torch.float32", "torch.float", "torch.float64", "torch.double")
_REMADE = {call.format(read): dtype for call, dtype in _REMAKING.items() for read in _READS}


def _copied(match: Match, facts: Facts) -> Writing:
    """The copy on the device."""
    facts.need(f"`{match.text('X')[:60]}` is a tensor of zero dimensions", _readable)
    need_device(facts, match.text("D"))
    whole = {not is_floating(v.X) for v in facts.executions if v.has("X")}
    if len(whole) > 1:
        raise Refused("it is of floats and of integers, in different runs")
    dtype = _REMADE[match.form]
    if whole == {True}:
        if "float(" in match.form or dtype:
            raise Refused("an integer would be made a float by way of another")
        dtype = "torch.int64"
    elif dtype and match.source.dotted(match.parts["T"]) not in _FLOATS:
        raise Refused("the type that is asked for is not one of floats of 32 or 64 bits")
    dtype = dtype or "torch.get_default_dtype()"
    edits = replace(match, f"X.detach().to(device=D, dtype={dtype}, copy=True)")
    return Writing(for_kinds_seen(match, facts, edits))


def _readable(values: Values) -> bool:
    return not values.X.shape and (is_floating(values.X) or values.X.dtype == "int64")


REMADE_TENSOR: Fix = Fix(
    name="remade_tensor",
    doc="""`torch.tensor(loss.item(), device=d)` becomes `loss.detach().to(device=d, dtype=..., copy=True)`.

    The number is read, which waits, and copied back, which waits again. A copy on the device does neither.

    Needs a tensor of zero dimensions: of floats, whose copy has the default type or the one that is given,
    or of 64-bit integers. Ranks and types that were seen are tested for; for others the original is kept.""",
    codes=("TT101", "TT103"),
    equivalence="BITWISE",
    find=of_forms(lambda: REMADE_TENSOR, *_REMADE),
    write=_copied,
)


_ARRAYS = ("X.detach().cpu().numpy()", "X.cpu().detach().numpy()", "X.cpu().numpy()")
_RETURNS = (
    "torch.from_numpy({}).to(D)",
    "torch.tensor({}, device=D)",
    "torch.tensor({}).to(D)",
    "torch.as_tensor({}, device=D)",
)
_TRIPS = tuple(call.format(array) for call in _RETURNS for array in _ARRAYS)


def _stayed(match: Match, facts: Facts) -> Writing:
    """The copy on the device."""
    facts.need(f"`{match.text('X')[:60]}` is a tensor that NumPy can hold", _in_numpy)
    need_device(facts, match.text("D"))
    return Writing(replace(match, "X.detach().to(D, copy=True)"))


def _in_numpy(values: Values) -> bool:
    return is_tensor(values.X) and values.X.dtype != "bfloat16"


ROUND_TRIP: Fix = Fix(
    name="round_trip",
    doc="""`torch.from_numpy(x.detach().cpu().numpy()).to(d)` becomes `x.detach().to(d, copy=True)`.

    The values go to the host and back, and the host waits both times. A copy on the device has
    the same values and type; in memory they may lie in another order, in which a sum rounds in another way.

    Needs a tensor that wants no gradient where none is cut off, as NumPy's arrays do.
    """,
    codes=("TT101", "TT103"),
    equivalence="ROUNDING",
    find=of_forms(lambda: ROUND_TRIP, *_TRIPS),
    write=_stayed,
)


FIXES = (DEVICE_ALPHA, DEVICE_ARGUMENT, REMADE_TENSOR, ROUND_TRIP)
