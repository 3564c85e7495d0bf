"""Numbers that are read only to go back to the device: the tensor itself replaces them."""

from __future__ import annotations

import re

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, FixRefused, Values, is_floating, is_tensor
from torchtrim.source.names import is_unshared
from torchtrim.source.transfers import need_device, without_detach
from torchtrim.syncs.lookup import is_from


def _need_stays(match: Match, part: str) -> None:
    """Require that the tensor is not written to after its number was read."""
    tensor = without_detach(match.parts[part])
    if not is_unshared(match.source, tensor, match.source.statement(match.node)):
        raise FixRefused(f"`{match.text(part)[:60]}` may be written to afterwards. Use `.clone()`")


def _wants_gradient(facts: Facts, part: str) -> bool:
    """Return True if a gradient flows through the tensor, or may flow if no run was observed."""
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
    match.need(
        facts,
        "P",
        "is a tensor of zero dimensions",
        lambda seen: is_floating(seen) and not seen.shape,
    )
    facts.need("the product has the type and device of both tensors", _keeps_type)
    _need_stays(match, "P")
    template = _ALPHAS[match.form]
    if _wants_gradient(facts, "P"):
        template = re.sub(r"\bP\b", "P.detach()", template)
    return Writing(replace(match, template))


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
    doc="""`g.sub(w, alpha=p)` with a tensor `p` on the device becomes `g - w * p`.

    `alpha` is a Python number, so a tensor passed for it is read silently. As a product it stays on the
    device. The product is rounded once more than the fused form.

    Refused if the product would have another type than `w`, and if `p` may be written to afterwards.
    """,
    codes=("TT101",),
    equivalence="ROUNDING",
    find=of_forms(lambda: DEVICE_ALPHA, *_ALPHAS),
    write=_as_product,
)


_NAMED = ("clamp(X, max=N)", "clamp(X, min=N)", "clip(X, max=N)", "clip(X, min=N)")
_CLAMPS = ("clamp", "clip", "clamp_", "clip_")
_ARITHMETIC = ("add", "sub", "mul", "div")
_METHODS = (
    *(f"X.{name}({word}=N)" for name in _CLAMPS for word in ("min", "max")),
    *(f"X.{name}(N)" for name in (*_ARITHMETIC, "add_", "sub_", "mul_", "div_", "fill_")),
    "X.masked_fill(M, N)",
    "X.masked_fill_(M, N)",
)
_FUNCTIONS = (
    *(f"torch.{name}" for name in _NAMED),
    *(f"torch.{name}(X, N)" for name in _ARITHMETIC),
    "torch.masked_fill(X, M, N)",
    "torch.where(M, X, N)",
    "torch.where(M, N, X)",
)
_ARGUMENTS = [
    template.replace("N)", f"{read})").replace("N,", f"{read},")
    for template in (*_METHODS, *_FUNCTIONS)
    for read in ("N.item()", "float(N)")
]


def _as_argument(match: Match, facts: Facts) -> Writing:
    facts.need(
        f"`{match.text('N')[:60]}` is a tensor of zero dimensions, with the type and device of "
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
            f"`{match.text('X')[:60]}` needs no gradient, which at a bound differs for tensors and numbers",
            lambda v: not v.X.requires_grad,
        )
    _need_stays(match, "N")
    given = "N.detach()" if _wants_gradient(facts, "N") else "N"
    read = "float(N)" if "float(N)" in match.form else "N.item()"
    return Writing(replace(match, match.form.replace(read, given)))


DEVICE_ARGUMENT: Fix = Fix(
    name="device_argument",
    doc="""`x.clamp(max=t.item())`, `x.masked_fill(m, t.item())`, `x.mul(t.item())` take the tensor itself.

    Each of these functions accepts a tensor of zero dimensions for the number, and then reads nothing. The
    tensor must have the type of `x`, so that the result keeps it, and be on its device. It is detached, as
    the number was. A device divides by a Python number as a multiplication by its reciprocal, so a quotient
    may differ in its last bit.

    Refused if the tensor may be written to afterwards, since backward would see that; and, from torch 2.14
    on, for a bound if `x` needs a gradient: where an element equals the bound, tensors and numbers have
    different gradients.
    """,
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
    facts.need(
        f"`{match.text('X')[:60]}` is a tensor of zero dimensions",
        lambda v: not v.X.shape and (is_floating(v.X) or v.X.dtype == "int64"),
    )
    need_device(facts, match.text("D"))
    whole = {not is_floating(v.X) for v in facts.executions if v.has("X")}
    if len(whole) > 1:
        raise FixRefused("it has a float type in some runs and an integer type in others")
    dtype = _REMADE[match.form]
    if whole == {True}:
        if "float(" in match.form or dtype:
            raise FixRefused("an integer would be converted to a float through another type")
        dtype = "torch.int64"
    elif dtype and match.source.dotted(match.parts["T"]) not in _FLOATS:
        raise FixRefused("the requested type is not float32 or float64")
    dtype = dtype or "torch.get_default_dtype()"
    return Writing(replace(match, f"X.detach().to(device=D, dtype={dtype}, copy=True)"))


REMADE_TENSOR: Fix = Fix(
    name="remade_tensor",
    doc="""`torch.tensor(loss.item(), device=d)` becomes `loss.detach().to(device=d, dtype=..., copy=True)`.

    The number is read, which waits, and copied back, which waits again. A copy on the device does neither.

    Needs a tensor of zero dimensions: of floats, whose copy has the default type or the given one, or of
    64-bit integers.
    """,
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
    facts.need(
        f"`{match.text('X')[:60]}` is a tensor that NumPy can represent",
        lambda v: is_tensor(v.X) and v.X.dtype != "bfloat16",
    )
    need_device(facts, match.text("D"))
    return Writing(replace(match, "X.detach().to(D, copy=True)"))


ROUND_TRIP: Fix = Fix(
    name="round_trip",
    doc="""`torch.from_numpy(x.detach().cpu().numpy()).to(d)` becomes `x.detach().to(d, copy=True)`.

    The values travel to the host and back, and the host waits both times. A copy on the device has the same
    values and type. Its memory layout may differ, which may change the rounding of a sum.

    Needs a tensor without gradient, unless the line detaches it, as NumPy does.
    """,
    codes=("TT101", "TT103"),
    equivalence="ROUNDING",
    find=of_forms(lambda: ROUND_TRIP, *_TRIPS),
    write=_stayed,
)


FIXES = (DEVICE_ALPHA, DEVICE_ARGUMENT, REMADE_TENSOR, ROUND_TRIP)
