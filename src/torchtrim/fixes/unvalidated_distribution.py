"""`Normal(mean, std)` of `torch.distributions` gets `validate_args=False`.

A distribution checks its parameters when it is made, and each value whose `log_prob` is asked for: a read of
the device for each of them. Samples, probabilities and gradients are the same without the checks.

Never applied without being asked for: a parameter or a value that is out of bounds is no longer noticed.
Refused where the call says itself whether it checks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import check_comments
from torchtrim.source.facts import Facts, Refused, is_tensor
from torchtrim.source.source import Source

_CHECKED_NAMES = """
    Bernoulli Beta Binomial Categorical Cauchy Chi2 ContinuousBernoulli Dirichlet Exponential FisherSnedecor
    Gamma Geometric Gumbel HalfCauchy HalfNormal Independent InverseGamma Kumaraswamy Laplace LogNormal
    LogisticNormal LowRankMultivariateNormal MixtureSameFamily Multinomial MultivariateNormal
    NegativeBinomial Normal OneHotCategorical
    Pareto Poisson RelaxedBernoulli StudentT Uniform VonMises Weibull
"""
_CHECKED = frozenset(_CHECKED_NAMES.split())
_RISK = "a parameter or a value that is out of bounds is no longer noticed"


def find(source: Source) -> Iterator[Match]:
    """Distributions that are made of something."""
    for node in source.at({(ast.Call, name) for name in _CHECKED}):
        assert isinstance(node, ast.Call)
        dotted = source.dotted(node.func) or ""
        if dotted.startswith("torch.distributions.") and (node.args or node.keywords):
            given = [*node.args, *(word.value for word in node.keywords)]
            parts = {f"P{number}": one for number, one in enumerate(given)}
            yield Match(fix=FIX, source=source, node=node, parts=parts)


def write(match: Match, facts: Facts) -> Writing:
    """The same call that checks nothing."""
    source, node = match.source, match.node
    assert isinstance(node, ast.Call)
    if any(word.arg in ("validate_args", None) for word in node.keywords):
        raise Refused("it says itself whether it checks, or may")
    facts.need(
        "one of its parameters is a tensor",
        lambda v: any(is_tensor(getattr(v, part)) for part in match.parts if v.has(part)),
    )
    last = max(match.parts.values(), key=source.end)
    at = source.end(last)
    if source.text[at : source.end(node) - 1].strip(" \t\r\n,"):
        raise Refused("its last argument is in parentheses, or has a comment behind it")
    edits = (Edit(at, at, ", validate_args=False"),)
    check_comments(source, edits)
    return Writing(edits, risk=_RISK)


FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=find, write=write)
