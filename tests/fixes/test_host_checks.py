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

CHOLESKY_CALLS = (
    "torch.linalg.cholesky(a @ a.mT + 1 * e)",
    "torch.linalg.cholesky(e + e, upper=True)",
)


def make_cholesky(rng: random.Random) -> Iterator[proving.Inputs]:
    size, rows = rng.choice(((), (2,), (2, 3))), rng.choice((1, 2, 4))
    dtype, graded = rng.choice((torch.float32, torch.float64)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        a = proving.floating(rng, (*size, rows, rows), dtype) / 8
        yield {"a": a.requires_grad_(graded), "e": torch.eye(rows, dtype=dtype)}


@pytest.mark.parametrize("call", CHOLESKY_CALLS)
def test_unchecked_cholesky_is_the_same_and_never_safe(call: str) -> None:
    code = f"import torch\ndef function(a, e):\n    return {call}\n"
    assert proving.prove(
        UNCHECKED_CHOLESKY, code, make_cholesky, structures=130, suggested=True
    ).reaches(520)
    assert not proving.prove(UNCHECKED_CHOLESKY, code, make_cholesky, structures=2).agreed


def test_unchecked_cholesky_what_is_no_tensor_of_floats_is_refused() -> None:
    code = "import torch\ndef function(e):\n    return torch.linalg.cholesky(e)\n"
    proving.refuses(
        UNCHECKED_CHOLESKY, code, {"e": torch.eye(2, dtype=torch.complex64)}, "a tensor of floats"
    )


def test_unchecked_cholesky_waits_no_more() -> None:
    code = "import torch\ndef function(e):\n    return torch.linalg.cholesky(e)\n"
    assert proving.syncs_go(UNCHECKED_CHOLESKY, code, {"e": torch.eye(3)}) == (1, 0)


INVERSE_CALLS = ("torch.linalg.inv(a)", "torch.inverse(a * 1)", "torch.linalg.solve(a, b)")


def make_inverse(rng: random.Random) -> Iterator[proving.Inputs]:
    size, rows = rng.choice(((), (2,), (2, 3))), rng.choice((1, 2, 4))
    dtype, graded = rng.choice((torch.float32, torch.float64)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        a = proving.floating(rng, (*size, rows, rows), dtype) / 8 + 4 * torch.eye(rows, dtype=dtype)
        yield {"a": a.requires_grad_(graded), "b": proving.floating(rng, (*size, rows, 2), dtype)}


@pytest.mark.parametrize("call", INVERSE_CALLS)
def test_unchecked_inverse_is_the_same_and_never_safe(call: str) -> None:
    code = f"import torch\ndef function(a, b):\n    return {call}\n"
    assert proving.prove(
        UNCHECKED_INVERSE, code, make_inverse, structures=85, suggested=True
    ).reaches(340)
    assert not proving.prove(UNCHECKED_INVERSE, code, make_inverse, structures=2).agreed


def test_unchecked_inverse_what_is_no_tensor_of_floats_is_refused() -> None:
    code = "import torch\ndef function(a):\n    return torch.linalg.inv(a)\n"
    proving.refuses(
        UNCHECKED_INVERSE, code, {"a": torch.eye(2, dtype=torch.complex64)}, "a tensor of floats"
    )


@pytest.mark.parametrize("call", INVERSE_CALLS)
def test_unchecked_inverse_waits_no_more(call: str) -> None:
    code = f"import torch\ndef function(a, b):\n    return {call}\n"
    inputs = {"a": torch.eye(3), "b": torch.ones(3, 2)}
    assert proving.syncs_go(UNCHECKED_INVERSE, code, inputs) == (1, 0)


HEAD = "import torch\nfrom torch.distributions import Categorical, Normal\n"
BODIES = (
    "    d = Normal(x, 1.5)\n    return d.log_prob(x), d.entropy()",
    "    d = Categorical(logits=x)\n    return d.sample(), d.log_prob(torch.zeros(x.shape[:-1]))",
    "    return torch.distributions.Bernoulli(\n        logits=x,\n    ).sample()",
    "    return torch.distributions.kl_divergence(Normal(x, 1.0), x.new_zeros(())) if 0 else x",
)


def make_distribution(rng: random.Random) -> Iterator[proving.Inputs]:
    size = (*(max(1, one) for one in proving.shape(rng)), 3)
    dtype = rng.choice((torch.float32, torch.float64))
    graded = rng.random() < 0.5
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype).requires_grad_(graded)}


@pytest.mark.parametrize("body", BODIES)
def test_unvalidated_distribution_is_the_same_and_never_safe(body: str) -> None:
    code = f"{HEAD}def function(x):\n{body}\n"
    assert proving.prove(
        UNVALIDATED_DISTRIBUTION, code, make_distribution, structures=65, suggested=True
    ).reaches(240 if "if 0" not in body else 0)
    assert not proving.prove(UNVALIDATED_DISTRIBUTION, code, make_distribution, structures=2).agreed


def test_unvalidated_distribution_what_is_written() -> None:
    for call in ("Normal(x, 1.0)", "Normal(x, (1.0))", "Normal(\n        x, 1.0,  # one\n    )"):
        code = f"{HEAD}def function(x):\n    return {call}.mean\n"
        rewrite = proving.fixed(UNVALIDATED_DISTRIBUTION, code, {"x": torch.ones(3)})
        assert [edit.text for edit in rewrite.edits] == [", validate_args=False"]
        assert proving.agree(rewrite, code, proving.text_of(rewrite), {"x": torch.ones(3)})
        assert "no longer detected" in rewrite.risk


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("Normal(x, 1.0, validate_args=True)", "already sets"),
        ("Normal(0.0, 1.0)", "is a tensor"),
    ],
)
def test_unvalidated_distribution_is_refused(call: str, reason: str) -> None:
    proving.refuses(
        UNVALIDATED_DISTRIBUTION,
        f"{HEAD}def function(x):\n    return {call}\n",
        {"x": torch.ones(3)},
        reason,
    )


def test_a_name_of_another_module_is_not_meant() -> None:
    code = "from mine import Normal\ndef f(x):\n    return Normal(x, 1.0)\n"
    assert not proving.matches(UNVALIDATED_DISTRIBUTION, code)


def test_unvalidated_distribution_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    code = f"{HEAD}def function(x):\n    return Normal(x, x).log_prob(x)\n"
    before, after = proving.syncs_go(UNVALIDATED_DISTRIBUTION, code, {"x": torch.ones(3)})
    assert before >= 2
    assert after == 0


def make_assert(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng), rng.choice((torch.float32, torch.bfloat16, torch.float64))
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype).abs()}


TESTS = (
    'assert (x >= 0).all(), "no negative ones"',
    "assert not torch.isnan(x).any()",
    "assert not (x < 0).any(), (\n        'negative'\n    )",
    "assert torch.isfinite(x).all()",
)


@pytest.mark.parametrize("line", TESTS)
def test_what_holds_is_the_same_and_never_safe(line: str) -> None:
    code = f"import torch\ndef function(x):\n    {line}\n    return x * 2\n"
    assert proving.prove(DEVICE_ASSERT, code, make_assert, structures=65, suggested=True).reaches(
        260
    )
    assert not proving.prove(DEVICE_ASSERT, code, make_assert, structures=2).agreed


def test_what_does_not_hold_raises_still() -> None:
    code = f"import torch\ndef function(x):\n    {TESTS[0]}\n    return x\n"
    rewrite = proving.fixed(DEVICE_ASSERT, code, {"x": torch.ones(3)})
    assert "cannot use the device afterwards" in rewrite.risk
    (edit,) = rewrite.edits
    assert edit.text == 'torch._assert_async((x >= 0).all(), "no negative ones")'
    with pytest.raises(RuntimeError, match="no negative ones"):
        torch._assert_async((torch.tensor([-1.0]) >= 0).all(), "no negative ones")


def test_a_message_that_is_computed_is_refused() -> None:
    code = 'def function(x):\n    assert (x > 0).all(), f"found {x}"\n'
    proving.refuses(DEVICE_ASSERT, code, {"x": torch.ones(3)}, "computed on failure")


def test_what_the_host_knows_is_no_match() -> None:
    assert not proving.matches(DEVICE_ASSERT, "def f(x, n):\n    assert x.ndim == 2 and n > 3\n")


def test_device_assert_waits_no_more() -> None:
    code = f"import torch\ndef function(x):\n    {TESTS[0]}\n    return x\n"
    assert proving.syncs_go(DEVICE_ASSERT, code, {"x": torch.ones(3)}) == (1, 0)
