"""`Normal(mean, std)` without its checks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.unvalidated_distribution import FIX
from torchtrim.source.facts import Refused
from torchtrim.source.source import Source

HEAD = "import torch\nfrom torch.distributions import Categorical, Normal\n"
BODIES = (
    "    d = Normal(x, 1.5)\n    return d.log_prob(x), d.entropy()",
    "    d = Categorical(logits=x)\n    return d.sample(), d.log_prob(torch.zeros(x.shape[:-1]))",
    "    return torch.distributions.Bernoulli(\n        logits=x,\n    ).sample()",
    "    return torch.distributions.kl_divergence(Normal(x, 1.0), x.new_zeros(())) if 0 else x",
)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = (*(max(1, one) for one in proving.shape(rng)), 3)
    dtype = rng.choice((torch.float32, torch.float64))
    graded = rng.random() < 0.5
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype).requires_grad_(graded)}


@pytest.mark.parametrize("body", BODIES)
def test_it_is_the_same_and_never_safe(body: str) -> None:
    code = f"{HEAD}def function(x):\n{body}\n"
    proof = proving.prove(FIX, code, make, structures=65, suggested=True)
    assert proof.reaches(240 if "if 0" not in body else 0), proof
    assert not proving.prove(FIX, code, make, structures=2).agreed


def test_what_is_written() -> None:
    code = f"{HEAD}def function(x):\n    return Normal(x, 1.0).mean\n"
    rewrite = proving.fixed(FIX, code, {"x": torch.ones(3)})
    assert [edit.text for edit in rewrite.edits] == [", validate_args=False"]
    assert "no longer noticed" in rewrite.risk


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("Normal(x, 1.0, validate_args=True)", "says itself"),
        ("Normal(0.0, 1.0)", "is a tensor"),
        ("Normal(x, (1.0))", "in parentheses"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"{HEAD}def function(x):\n    return {call}\n", {"x": torch.ones(3)})


def test_a_name_of_another_module_is_not_meant() -> None:
    code = "from mine import Normal\ndef f(x):\n    return Normal(x, 1.0)\n"
    assert not list(FIX.find(Source("case.py", code)))


def test_it_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    code = f"{HEAD}def function(x):\n    return Normal(x, x).log_prob(x)\n"
    before, after = proving.syncs_go(FIX, code, {"x": torch.ones(3)})
    assert before >= 2
    assert after == 0
