"""Rows about linear algebra, whose error checks are read on the host."""

from __future__ import annotations

from torchtrim.syncs.base import TT101, Ask, device, filled, native, number_on_device, on_device

_SOURCE = "BatchLinearAlgebra.cpp"
_LIBRARY = "cuda/linalg/BatchLinearAlgebraLib.cpp"


def _checked(ask: Ask) -> int:
    return int(bool(ask.args.get("check_errors")) and number_on_device(ask, ("A", "self")) > 0)


def _decomposed(ask: Ask) -> int:
    matrix = ask.args["A"]
    if not on_device(ask, matrix) or not matrix.numel():
        return 0
    return 1 if ask.args.get("driver") == "gesvd" else 2


def _eigenvalues(ask: Ask) -> int:
    matrix = ask.args["self"]
    if not on_device(ask, matrix):
        return 0
    return 2 if "complex" in str(matrix.dtype) else 3


def _exponential(ask: Ask) -> int:
    matrix = ask.args["self"]
    return 2 if on_device(ask, matrix) and matrix.numel() and matrix.shape[-1] > 1 else 0


ROWS = (
    TT101(
        name="linalg-check",
        what="The check of `linalg.inv`, `solve`, `cholesky`, `lu_factor` and others for singular input",
        when="the input is on the device",
        operators=("aten::_linalg_check_errors",),
        waits=device("info"),
        evidence=(native(_SOURCE, 1583, "reads whether any matrix failed"),),
        advice="The `_ex` form, such as `torch.linalg.inv_ex`; read `info` later, if at all.",
    ),
    TT101(
        name="linalg-check-errors",
        what="A `linalg` function in its `_ex` form that checks for errors",
        when="`check_errors` is True",
        operators=(
            "aten::linalg_inv_ex",
            "aten::linalg_cholesky_ex",
            "aten::linalg_lu_factor_ex",
            "aten::linalg_ldl_factor_ex",
            "aten::_linalg_solve_ex",
        ),
        waits=_checked,
        evidence=(
            native(_SOURCE, 1672, "inv_ex checks for errors"),
            native(_SOURCE, 1869, "cholesky_ex checks"),
            native(_SOURCE, 1979, "solve_ex checks"),
            native(_SOURCE, 2053, "lu_factor_ex checks"),
            native(_SOURCE, 3751, "ldl_factor_ex checks"),
        ),
        advice="`check_errors=False`, the default.",
    ),
    TT101(
        name="cholesky",
        what="`torch.cholesky`",
        when="the matrix is on the device and not empty",
        operators=("aten::cholesky",),
        waits=filled("self"),
        evidence=(native(_SOURCE, 1790, "checks for errors"),),
        advice="`torch.linalg.cholesky_ex`.",
        until="2.14",
    ),
    TT101(
        name="eigh",
        what="`torch.linalg.eigh` and `eigvalsh`",
        when="the matrix is on the device",
        operators=("aten::_linalg_eigh",),
        waits=filled("A"),
        evidence=(native(_SOURCE, 2843, "checks for errors"),),
        advice="Every version synchronizes: call it rarely.",
    ),
    TT101(
        name="svd",
        what="`torch.linalg.svd`, `svdvals`, and functions built on them: `pinv`, `matrix_rank`, `cond`",
        when="the matrix is on the device: twice, and once with the driver `gesvd`",
        operators=("aten::_linalg_svd",),
        waits=_decomposed,
        evidence=(
            native(_LIBRARY, 596, "copies the convergence of each matrix to the host"),
            native(_SOURCE, 3211, "checks for errors"),
        ),
        advice="`torch.svd_lowrank` or `eigh` of `x.mT @ x` synchronize less.",
    ),
    TT101(
        name="eig",
        what="`torch.linalg.eig` and `eigvals`",
        when="the matrix is on the device, at least three times if it is real, else twice",
        operators=("aten::linalg_eig",),
        waits=_eigenvalues,
        evidence=(
            native(_SOURCE, 2994, "reads whether all elements are finite"),
            native(_SOURCE, 2965, "reads whether all imaginary parts are zero"),
            native(_SOURCE, 3071, "checks for errors"),
        ),
        advice="`torch.linalg.eigh` if the matrix is symmetric.",
    ),
    TT101(
        name="lstsq",
        what="`torch.linalg.lstsq`",
        when="the matrix is on the device",
        operators=("aten::linalg_lstsq",),
        waits=filled("self"),
        evidence=(native(_SOURCE, 3703, "checks for errors"),),
        advice="`torch.linalg.solve_ex` on the normal equations, if they are well conditioned.",
    ),
    TT101(
        name="ldl-solve",
        what="`torch.linalg.ldl_solve`",
        when="always, for all streams of the device",
        operators=("aten::linalg_ldl_solve",),
        waits=filled("LD", "B"),
        evidence=(native(_LIBRARY, 150, "synchronizes the whole device"),),
        advice="`torch.linalg.solve_ex`.",
    ),
    TT101(
        name="matrix-exp",
        what="`torch.linalg.matrix_exp`",
        when="the matrix is on the device and larger than one element, at least twice",
        operators=("aten::linalg_matrix_exp",),
        waits=_exponential,
        evidence=(
            native("LinearAlgebra.cpp", 2667, "the norm of a single matrix decides on the host"),
            native("LinearAlgebra.cpp", 2612, "the numbers of squarings of a batch are copied"),
        ),
        advice="Every version synchronizes: call it rarely.",
    ),
)
