"""Checks that read a tensor on the host: in linear algebra, in distributions, and assertions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, of_forms
from torchtrim.rewriter.replace import added_keyword, atom, replace, torch_of
from torchtrim.source.branches import is_elif
from torchtrim.source.facts import Facts, FixRefused, is_floating, is_tensor
from torchtrim.source.nodes import constant_of, find_all, keywords_of, name_set, negated
from torchtrim.source.source import SourceFile
from torchtrim.source.transfers import is_single, read_of


def _unchecked(name: str, doc: str, forms: Mapping[str, str], risk: str) -> Fix:
    def write(match: Match, facts: Facts) -> Writing:
        match.need(facts, "A", "is a tensor of floats", is_floating)
        return Writing(replace(match, forms[match.form]), risk=risk)

    find = of_forms(lambda: fix, *forms)
    fix = Fix(name=name, doc=doc, codes=("TT101",), equivalence="BITWISE", find=find, write=write)
    return fix


UNCHECKED_CHOLESKY = _unchecked(
    "unchecked_cholesky",
    """`torch.linalg.cholesky(a)` becomes `torch.linalg.cholesky_ex(a).L`.

    Both compute the same; the first reads whether the matrix was positive definite, and raises if not. The
    second leaves that on the device.

    Applied only with `--unsafe-fixes`: for a matrix that is not positive definite it returns an invalid
    factor, and raises no error.
    """,
    {
        "torch.linalg.cholesky(A)": "torch.linalg.cholesky_ex(A).L",
        "torch.linalg.cholesky(A, upper=U)": "torch.linalg.cholesky_ex(A, upper=U).L",
    },
    risk="a matrix that is not positive definite is no longer an error",
)

UNCHECKED_INVERSE = _unchecked(
    "unchecked_inverse",
    """`torch.linalg.inv(a)` becomes `torch.linalg.inv_ex(a).inverse`, and `solve(a, b)` `solve_ex(a,
    b).result`.

    Both compute the same; the first reads whether the matrix was singular, and raises if so. The second
    leaves that on the device.

    Applied only with `--unsafe-fixes`: for a singular matrix it returns infinities or NaN, and raises no
    error.
    """,
    {
        "torch.linalg.inv(A)": "torch.linalg.inv_ex(A).inverse",
        "torch.inverse(A)": "torch.linalg.inv_ex(A).inverse",
        "torch.linalg.solve(A, B)": "torch.linalg.solve_ex(A, B).result",
    },
    risk="a singular matrix is no longer an error",
)


_CHECKED = name_set("""
    Bernoulli Beta Binomial Categorical Cauchy Chi2 ContinuousBernoulli Dirichlet Exponential FisherSnedecor
    Gamma Geometric Gumbel HalfCauchy HalfNormal Independent InverseGamma Kumaraswamy Laplace LogNormal
    LogisticNormal LowRankMultivariateNormal MixtureSameFamily Multinomial MultivariateNormal
    NegativeBinomial Normal OneHotCategorical
    Pareto Poisson RelaxedBernoulli StudentT Uniform VonMises Weibull
""")


def _find_unvalidated_distribution(source: SourceFile) -> Iterator[Match]:
    for node in source.calls(*_CHECKED):
        dotted = source.dotted(node.func) or ""
        if dotted.startswith("torch.distributions.") and (node.args or node.keywords):
            given = enumerate((*node.args, *(word.value for word in node.keywords)))
            parts = {f"P{number}": argument for number, argument in given}
            yield Match(fix=UNVALIDATED_DISTRIBUTION, source=source, node=node, parts=parts)


def _write_unvalidated_distribution(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    if keywords_of(node).keys() & {"validate_args", None}:
        raise FixRefused("it already sets `validate_args`, or may")
    facts.need(
        "one of its parameters is a tensor",
        lambda v: any(is_tensor(getattr(v, part)) for part in match.parts if v.has(part)),
    )
    edit = added_keyword(source, node, "validate_args=False")
    return Writing((edit,), risk="parameters and values out of bounds are no longer detected")


UNVALIDATED_DISTRIBUTION: Fix = Fix(
    name="unvalidated_distribution",
    doc="""`Normal(mean, std)` of `torch.distributions` gets `validate_args=False`.

    A distribution checks its parameters in its constructor, and each value passed to `log_prob`: each check
    reads the device. Samples, probabilities and gradients are the same without the checks.

    Applied only with `--unsafe-fixes`: parameters and values out of bounds are no longer detected. Refused if
    the call itself sets `validate_args`.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_find_unvalidated_distribution,
    write=_write_unvalidated_distribution,
)


_TESTS = name_set("all any isfinite isnan isinf allclose equal item")


def _find_device_assert(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.Assert):
        test = negated(node.test) or node.test
        read = read_of(test, source)
        if read is not None and read.cast in ("", "bool"):
            test = read.tensor
        attributes = find_all(node.test, ast.Attribute)
        if any(one.attr in _TESTS for one in attributes) and not isinstance(test, ast.BoolOp):
            yield Match(fix=DEVICE_ASSERT, source=source, node=node, parts={"C": test})

    yield from _raising(source)


def _raising(source: SourceFile) -> Iterator[Match]:
    """Yield each `if not x.isfinite(): raise ...`."""
    for node in source.each(ast.If):
        attributes = [one.attr for one in find_all(node.test, ast.Attribute)]
        alone = len(node.body) == 1 and not node.orelse and not is_elif(source, node)
        if not alone or not isinstance(node.body[0], ast.Raise) or _TESTS.isdisjoint(attributes):
            continue
        test = negated(node.test) or node.test
        read = read_of(test, source)
        if not isinstance(test, ast.BoolOp):
            parts = {"C": read.tensor if read is not None else test}
            yield Match(fix=DEVICE_ASSERT, source=source, node=node, parts=parts)


def _write_device_assert(match: Match, facts: Facts) -> Writing:
    node, source = match.node, match.source
    facts.need(
        f"`{match.text('C')[:60]}` is a one-element boolean tensor",
        lambda v: is_single(v.C) and v.C.dtype == "bool",
    )
    if isinstance(node, ast.If):
        return _checked_later(match, node)
    assert isinstance(node, ast.Assert)
    message = ""
    if node.msg is not None:
        if not isinstance(constant_of(node.msg), str):
            raise FixRefused(
                "its message is computed on failure; the device accepts only a literal string"
            )
        message = f", {source.segment(node.msg)}"
    torch, imports = torch_of(source)
    test = match.text("C")
    if negated(node.test):
        test = f"{atom(source, match.parts['C'])}.logical_not()"
    edit = TextEdit.of(source, node, f"{torch}._assert_async({test}{message})")
    risk = "if it fails, the error comes later, and the process cannot use the device afterwards"
    return Writing((edit, *imports), risk)


def _checked_later(match: Match, node: ast.If) -> Writing:
    """Return the check of `if not x.isfinite(): raise` on the device, for a person to copy."""
    source, raised = match.source, node.body[0]
    assert isinstance(raised, ast.Raise)
    words = getattr(raised.exc, "args", [])
    message = source.segment(words[0]) if words and isinstance(constant_of(words[0]), str) else ""
    test = match.text("C") if negated(node.test) else f"~{atom(source, match.parts['C'])}"
    torch, imports = torch_of(source)
    text = f"{torch}._assert_async({test}{message and ', '}{message})"
    return Writing(
        (TextEdit.of(source, node, text), *imports),
        advice="it raises, so the host must know. The device can check, and fail later with another error",
    )


DEVICE_ASSERT: Fix = Fix(
    name="device_assert",
    doc="""`assert (a >= b).all(), "message"` becomes `torch._assert_async(...)`, which the device checks.

    Applied only with `--unsafe-fixes`: if the assertion fails, the error comes later than the statement, at
    the host's next wait, and on CUDA the process cannot use the device afterwards, so the error cannot be
    caught. While it holds, the results are the same. Python's `-O` removes the original but not the
    replacement. `if not loss.isfinite(): raise ...` raises another error, so there it is only a diff to copy.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_find_device_assert,
    write=_write_device_assert,
)


FIXES = (DEVICE_ASSERT, UNCHECKED_CHOLESKY, UNCHECKED_INVERSE, UNVALIDATED_DISTRIBUTION)
