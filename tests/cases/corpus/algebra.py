"""Linear algebra."""

from __future__ import annotations

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import CHECK, ELEMENTWISE, REDUCTION, aten


def _matrix() -> torch.Tensor:
    root = torch.rand(4, 4, device="cuda")
    return root @ root.mT + torch.eye(4, device="cuda")


@snippet(1, CHECK)
def inverse() -> Body:
    x = _matrix()
    return lambda: torch.linalg.inv(x)


@snippet(
    0, aten("BatchLinearAlgebra.cpp", 1671, "checks only where it is told to"), repairs=inverse
)
def inverse_unchecked() -> Body:
    x = _matrix()
    return lambda: torch.linalg.inv_ex(x).inverse


@snippet(1, aten("BatchLinearAlgebra.cpp", 1672, "checks for errors"), CHECK)
def inverse_told_to_check() -> Body:
    x = _matrix()
    return lambda: torch.linalg.inv_ex(x, check_errors=True).inverse


@snippet(1, CHECK)
def solve() -> Body:
    x, y = _matrix(), torch.rand(4, device="cuda")
    return lambda: torch.linalg.solve(x, y)


@snippet(0, aten("BatchLinearAlgebra.cpp", 1978, "checks only where it is told to"), repairs=solve)
def solve_unchecked() -> Body:
    x, y = _matrix(), torch.rand(4, device="cuda")
    return lambda: torch.linalg.solve_ex(x, y).result


@snippet(1, CHECK)
def cholesky() -> Body:
    x = _matrix()
    return lambda: torch.linalg.cholesky(x)


@snippet(
    0, aten("BatchLinearAlgebra.cpp", 1868, "checks only where it is told to"), repairs=cholesky
)
def cholesky_unchecked() -> Body:
    x = _matrix()
    return lambda: torch.linalg.cholesky_ex(x).L


@snippet(1, CHECK)
def lu_factors() -> Body:
    x = _matrix()
    return lambda: torch.linalg.lu_factor(x)


@snippet(1, aten("BatchLinearAlgebra.cpp", 2843, "checks for errors"), CHECK)
def eigenvalues_of_a_symmetric_matrix() -> Body:
    x = _matrix()
    return lambda: torch.linalg.eigh(x)


@snippet(
    2,
    aten("cuda/linalg/BatchLinearAlgebraLib.cpp", 596, "infos.cpu()"),
    aten("BatchLinearAlgebra.cpp", 3211, "checks for errors"),
)
def singular_values() -> Body:
    x = _matrix()
    return lambda: torch.linalg.svd(x)


@snippet(1, aten("BatchLinearAlgebra.cpp", 3703, "checks for errors"), CHECK)
def least_squares() -> Body:
    x, y = _matrix(), torch.rand(4, 2, device="cuda")
    return lambda: torch.linalg.lstsq(x, y)


@snippet(0, aten("BatchLinearAlgebra.cpp", 2114, "factors without a check"))
def determinant() -> Body:
    x = _matrix()
    return lambda: (torch.linalg.det(x), torch.linalg.slogdet(x))


@snippet(0, ELEMENTWISE, REDUCTION)
def products_and_norms() -> Body:
    x = _matrix()
    return lambda: (x @ x, torch.einsum("ij,jk->ik", x, x), x.norm(), torch.linalg.vector_norm(x))
