"""Fixes of checks that read a tensor on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.host_checks import (
    DEVICE_ASSERT,
    UNCHECKED_CHOLESKY,
    UNCHECKED_INVERSE,
    UNVALIDATED_DISTRIBUTION,
)
from torchtrim.rewriter.fix import Fix

HEAD = "import torch\nfrom torch.distributions import Categorical, Normal\ndef function({}):\n"
ASSERTED = 'assert (x >= 0).all(), "no negative ones"'


def make_matrices(rng: random.Random) -> Iterator[proving.Inputs]:
    size, rows = rng.choice(((), (2,), (2, 3))), rng.choice((1, 2, 4))
    dtype, graded = rng.choice((torch.float32, torch.float64)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        e = torch.eye(rows, dtype=dtype)
        a = proving.floating(rng, (*size, rows, rows), dtype) / 8 + 4 * e
        b = proving.floating(rng, (*size, rows, 2), dtype)
        yield {"a": a.requires_grad_(graded), "b": b, "e": e}


def make_distribution(rng: random.Random) -> Iterator[proving.Inputs]:
    size = (*(max(1, one) for one in proving.shape(rng)), 3)
    dtype, graded = rng.choice((torch.float32, torch.float64)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype).requires_grad_(graded)}


def make_positive(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng), rng.choice((torch.float32, torch.bfloat16, torch.float64))
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype).abs()}


BODIES = {
    (UNCHECKED_CHOLESKY, make_matrices, 130, 520, "a, b, e"): (
        "return torch.linalg.cholesky(a @ a.mT + 1 * e)",
        "return torch.linalg.cholesky(e + e, upper=True)",
    ),
    (UNCHECKED_INVERSE, make_matrices, 85, 340, "a, b, e"): (
        "return torch.linalg.inv(a)",
        "return torch.inverse(a * 1)",
        "return torch.linalg.solve(a, b)",
    ),
    (UNVALIDATED_DISTRIBUTION, make_distribution, 65, 240, "x"): (
        "d = Normal(x, 1.5)\nreturn d.log_prob(x), d.entropy()",
        "d = Categorical(logits=x)\nreturn d.sample(), d.log_prob(torch.zeros(x.shape[:-1]))",
        "return torch.distributions.Bernoulli(\n    logits=x,\n).sample()",
    ),
    (DEVICE_ASSERT, make_positive, 65, 260, "x"): (
        f"{ASSERTED}\nreturn x * 2",
        "assert not torch.isnan(x).any()\nreturn x * 2",
        "assert not (x < 0).any(), (\n    'negative'\n)\nreturn x * 2",
        "assert torch.isfinite(x).all()\nreturn x * 2",
    ),
}


@pytest.mark.parametrize(
    ("fix", "make", "structures", "least", "names", "body"),
    [(*case, body) for case, bodies in BODIES.items() for body in bodies],
)
def test_it_is_the_same_and_never_safe(
    fix: Fix, make: proving.Make, structures: int, least: int, names: str, body: str
) -> None:
    code = proving.code_of(HEAD.format(names), body)
    assert proving.prove(fix, code, make, structures=structures, suggested=True).reaches(least)
    assert not proving.prove(fix, code, make, structures=2).agreed


@pytest.mark.parametrize(
    ("fix", "body", "reason"),
    [
        (UNCHECKED_CHOLESKY, "return torch.linalg.cholesky(e)", "a tensor of floats"),
        (UNCHECKED_INVERSE, "return torch.linalg.inv(e)", "a tensor of floats"),
        (UNVALIDATED_DISTRIBUTION, "Normal(x, 1.0, validate_args=True)", "already sets"),
        (UNVALIDATED_DISTRIBUTION, "Normal(0.0, 1.0)", "is a tensor"),
        (DEVICE_ASSERT, 'assert (x > 0).all(), f"found {x}"', "computed on failure"),
    ],
)
def test_it_is_refused(fix: Fix, body: str, reason: str) -> None:
    inputs = {"x": torch.ones(3), "e": torch.eye(2, dtype=torch.complex64)}
    proving.refuses(fix, proving.code_of(HEAD.format("x, e"), body), inputs, reason)


@pytest.mark.parametrize(
    "call", ["Normal(x, 1.0)", "Normal(x, (1.0))", "Normal(\n        x, 1.0,  # one\n    )"]
)
def test_unvalidated_distribution_what_is_written(call: str) -> None:
    code = proving.code_of(HEAD.format("x"), f"return {call}.mean")
    rewrite = proving.fixed(UNVALIDATED_DISTRIBUTION, code, {"x": torch.ones(3)})
    assert [edit.text for edit in rewrite.edits] == [", validate_args=False"]
    assert proving.agree(rewrite, code, proving.text_of(rewrite), {"x": torch.ones(3)})
    assert "no longer detected" in rewrite.risk


def test_an_assertion_that_fails_still_raises() -> None:
    code = proving.code_of(HEAD.format("x"), f"{ASSERTED}\nreturn x")
    rewrite = proving.fixed(DEVICE_ASSERT, code, {"x": torch.ones(3)})
    assert "cannot use the device afterwards" in rewrite.risk
    (edit,) = rewrite.edits
    assert edit.text == 'torch._assert_async((x >= 0).all(), "no negative ones")'
    with pytest.raises(RuntimeError, match="no negative ones"):
        torch._assert_async((torch.tensor([-1.0]) >= 0).all(), "no negative ones")


def test_other_code_is_no_match() -> None:
    mine = "from mine import Normal\ndef f(x):\n    return Normal(x, 1.0)\n"
    assert not proving.matches(UNVALIDATED_DISTRIBUTION, mine)
    kl = "return torch.distributions.kl_divergence(x, y)"
    assert not proving.matches(UNVALIDATED_DISTRIBUTION, proving.code_of(HEAD.format("x, y"), kl))
    host = "def f(x, n):\n    assert x.ndim == 2 and n > 3\n"
    assert not proving.matches(DEVICE_ASSERT, host)


@pytest.mark.parametrize(
    ("fix", "body", "before"),
    [
        (UNCHECKED_CHOLESKY, "return torch.linalg.cholesky(torch.diag(x))", 1),
        (UNCHECKED_INVERSE, "return torch.linalg.inv(torch.diag(x))", 1),
        (UNCHECKED_INVERSE, "return torch.inverse(torch.diag(x))", 1),
        (UNCHECKED_INVERSE, "return torch.linalg.solve(torch.diag(x), x)", 1),
        (UNVALIDATED_DISTRIBUTION, "return Normal(x, x).log_prob(x)", 2),
        (DEVICE_ASSERT, f"{ASSERTED}\nreturn x", 1),
    ],
)
def test_it_waits_no_more(
    fix: Fix, body: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    code = proving.code_of(HEAD.format("x"), body)
    waits, left = proving.syncs_go(fix, code, {"x": torch.ones(3)})
    assert waits >= before
    assert left == 0


@pytest.mark.parametrize(
    ("test", "raised", "written"),
    [
        ("not x.isfinite().all()", "ValueError(f'{x}')", "torch._assert_async(x.isfinite().all())"),
        ("x.isnan().any().item()", "E('bad')", "torch._assert_async(~x.isnan().any(), 'bad')"),
    ],
)
def test_a_check_that_raises_is_shown_on_the_device(test: str, raised: str, written: str) -> None:
    code = f"import torch\ndef f(x):\n    if {test}:\n        raise {raised}\n"
    rewrite = proving.unseen(DEVICE_ASSERT, code)
    assert rewrite.advice
    assert [edit.text for edit in rewrite.edits] == [written]
