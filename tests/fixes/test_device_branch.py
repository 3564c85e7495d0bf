"""Fixes of branches on a tensor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fixes import proving
from torchtrim.fixes.device_branch import FIX
from torchtrim.rewriter.fix import Rewrite
from torchtrim.source.facts import Facts, FixRefused, NoTensor, StaticValue
from torchtrim.source.source import SourceFile

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

SEGMENTATION = """\
import torch
from torch import nn

IGNORE = -1

class MaskedLoss(nn.Module):
    def forward(self, scores, labels):
        if (
            (labels.flatten().sort().values.diff() != 0).sum() + (labels.numel() > 0)
            - (labels == IGNORE).any().long()
        ) < 2:
            # too few classes to learn from
            return 0.0 * scores.sum()
        mask = labels != IGNORE
        return nn.functional.cross_entropy(
            scores.masked_fill(~mask.unsqueeze(-1), 0),  # what is not labelled
            torch.where(mask, labels, -100),
        )

def function(scores, labels):
    return MaskedLoss()(scores, labels)
"""


def of_segmentation(rng: random.Random) -> Iterator[proving.Inputs]:
    rows, classes = rng.randint(1, 6), rng.randint(2, 4)
    graded = rng.random() < 0.7
    for _ in range(proving.DRAWS):
        scores = proving.floating(rng, (rows, classes), torch.float32, odd=rng.choice((0, 0, 0.3)))
        few = rng.choice((1, 1, classes))
        labels = proving.integral(rng, (rows,), torch.int64, -1, few)
        if rng.random() < 0.2:
            labels = torch.full((rows,), 300)
        yield {"scores": scores.requires_grad_(graded), "labels": labels}


def test_the_loss_of_segmentation_is_sound() -> None:
    assert proving.prove(FIX, SEGMENTATION, of_segmentation, structures=70).reaches(275)


def test_it_keeps_comments_and_waits_no_more() -> None:
    inputs = {
        "scores": torch.randn(5, 3, requires_grad=True),
        "labels": torch.tensor([0, 1, 2, -1, 0]),
    }
    rewrite = proving.fixed(FIX, SEGMENTATION, inputs)
    after = proving.text_of(rewrite)
    assert "# too few classes to learn from" in after
    assert "# what is not labelled" in after
    assert proving.syncs_go(FIX, SEGMENTATION, inputs) == (1, 0)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    dtype = rng.choice(FLOATS)
    graded = rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.3, 1.0)))
        yield {"x": x.requires_grad_(graded), "limit": rng.choice((-1e9, 0.1, 1.0, 1e9))}


BODIES = {
    "two returns": """
    norm = x.norm()
    if norm < limit:
        return x * 0.5
    else:
        return x / norm
""",
    "turned": """
    norm = x.norm()
    if not norm < limit:
        scale = 1 / norm.sqrt()
        return x * scale
    y = x.exp()
    return y.log() * 3
""",
    "two assignments": """
    if (x.sum() > limit):
        y = x.abs().sqrt()
    else:
        y = torch.log(x)
    return y
""",
    "expression": "    return (x.reciprocal() if x.sum() > limit else torch.sqrt(x)) + 1\n",
    "a number is true": "    return x.relu() if x.sum() else x.sqrt()\n",
    "fresh before": """
    y = x * 2
    if y.mean() > limit:
        y = y / y.norm()
    return y
""",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    code = f"import torch\ndef function(x, limit):\n{body}"
    assert proving.prove(FIX, code, make, structures=60).reaches(230)


def test_a_gradient_to_another_tensor_makes_it_unsafe() -> None:
    code = """
import torch
def function(g, eps):
    norm = torch.linalg.norm(g)
    if norm < eps:
        return torch.zeros_like(g)
    else:
        return g / norm
"""
    plain = proving.fixed(FIX, code, {"g": torch.randn(3), "eps": 1e-3})
    assert plain.safe
    assert plain.equivalence == "BITWISE"
    graded = proving.fixed(FIX, code, {"g": torch.randn(3, requires_grad=True), "eps": 1e-3})
    assert "only one branch passes a gradient to `g`" in graded.risk


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return x if x.sum() > 0 else x * 2", "would be lost"),
        ("if x.sum() > 0:\n    x = x * 2\nreturn x", "would be lost"),
        ("return x.sum() if x.sum() > 0 else 0.0", "a Python number"),
        ("return x.sum() if x.sum() > 0 else x * 2", "later code may depend on which"),
        ("return x * 3 if x > 0 else x * 2", "not a tensor of zero dimensions"),
        ("if float(x.sum()) == 0:\n    return x * 3\nreturn x * 2", "on the host before"),
        ("return x * 3 if x.sum().item() > 0 else x * 2", "so that the device can choose"),
        ("return x * 3 if x.ndim > 0 else x * 2", "not a tensor"),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    x = torch.randn(1) if "x > 0" in body else torch.randn(2, 3)
    proving.refuses(FIX, proving.code_of("def function(x):\n", body), {"x": x}, reason)


@pytest.mark.parametrize(
    "way",
    [
        "torch.randn_like(x)",
        "x.nonzero()",
        "work(x)",
        "x.add_(1)",
        "x[i]",
        "F.dropout(x)",
        "x.inverse()",
    ],
)
def test_what_may_do_more_is_no_match(way: str) -> None:
    head = "import torch\nimport torch.nn.functional as F\ndef f(x, i):\n"
    code = f"{head}    return {way} if x.sum() > 0 else x * 2\n"
    assert not proving.matches(FIX, code)


def test_without_evidence_it_is_open() -> None:
    source = SourceFile("case.py", "def f(x):\n    return x * 3 if x.sum() > 0 else x * 2\n")
    (match,) = FIX.find(source)
    static = {part: StaticValue(kind="tensor") for part in ("Q0A", "T", "E")}
    assert not FIX.rewrite(match, Facts(static=static)).safe
    with pytest.raises(FixRefused, match="the source does not show"):
        FIX.rewrite(match, Facts())
    with pytest.raises(FixRefused, match="the source contradicts"):
        FIX.rewrite(match, Facts(static={**static, "Q0A": StaticValue(kind=NoTensor("plain"))}))


def conditions(rng: random.Random) -> Iterator[proving.Inputs]:
    size, graded = proving.shape(rng), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, torch.float32, odd=rng.choice((0, 0.3))).requires_grad_(
            graded
        )
        yield {"x": x, "t": torch.tensor(rng.choice((-1.0, 0.0, 0.5, 1.0, float("nan"))))}


COMBINED = (
    "t > 0 and x.sum() > 0",
    "torch.isnan(t) or torch.isinf(x).any()",
    "not (t > 0 or x.sum() > t)",
    "not t and x.sum()",
    "0 < t < 1",
    "x.sum() < t <= 1 or not t == 0 and (x > 0).all()",
)


@pytest.mark.parametrize("condition", COMBINED)
def test_conditions_of_tensors_are_combined_on_the_device(condition: str) -> None:
    code = f"import torch\ndef function(x, t):\n    return (x * 2 if {condition} else x * 3) + 1\n"
    assert proving.prove(FIX, code, conditions, structures=50).reaches(200)
    inputs = {"x": torch.ones(3), "t": torch.tensor(0.5)}
    waits, left = proving.syncs_go(FIX, code, inputs)
    assert waits >= 1
    assert left == 0


HOSTS = (
    "flag and t > 0",
    "t > 0 and flag",
    "flag or t > 0",
    "not (flag and t > 0)",
    "t is not None and t > 0",
    "not flag and (torch.isnan(t) or torch.isinf(t))",
    "n > 0 and t > 0",
    "t > 0 and bool(x.any())",
    "-1 < n < 1 or t > 0",
)


@pytest.mark.parametrize("condition", HOSTS)
@pytest.mark.parametrize("form", ["expression", "statement"])
def test_what_the_host_decides_is_not_given_to_the_device(condition: str, form: str) -> None:
    body = f"    return (x * 2 if {condition} else x * 3) + 1\n"
    if form == "statement":
        body = (
            f"    if {condition}:\n        y = x * 2\n    else:\n        y = x * 3\n    return y\n"
        )
    code = f"import torch\ndef function(x, t, flag, n):\n{body}"
    for flag in (False, True):
        inputs = {"x": torch.ones(3), "t": torch.tensor(1.0), "flag": flag, "n": int(flag)}
        proving.refuses(
            FIX, code, inputs, r"Python value|on the host|no run has reached|side effect"
        )


def test_the_example_has_a_place_for_it() -> None:
    path = Path(__file__).parents[2] / "examples" / "segmentation.py"
    text = path.read_text().replace("torch.unique(labels)", "labels.sort().values")
    text = text.replace("[mask]", ".abs()")
    found = list(FIX.find(SourceFile(str(path), text)))
    assert any("MIN_CLASSES" in match.text("C") for match in found)


INTEGERS = (
    "    if t.sum() > 0:\n        y = t.float() * 2\n    else:\n        y = t * 1\n    return y\n"
)


@pytest.mark.parametrize(
    ("code", "inputs", "differs"),
    [
        (f"import torch\ndef function(t):\n{INTEGERS}", {"t": torch.ones(2)}, "`t` float64"),
        (
            "import torch\ndef function(x, y):\n"
            "    return (x * 2 if x.sum() + y.sum() > 0 else y * 3) + 1\n",
            {"x": torch.ones(3, 4), "y": torch.ones(3, 4)},
            "`x` float32",
        ),
    ],
)
def test_a_type_or_shape_for_which_the_ways_differ_is_named(
    code: str, inputs: proving.Inputs, differs: str
) -> None:
    rewrite = proving.written_by(FIX, code, inputs).rewrite
    assert not rewrite.safe
    assert rewrite.risk.startswith(f"it changes the result for {differs}")


@pytest.mark.parametrize(
    "body",
    [
        "bad = flag and torch.isnan(t)\n    y = x * 2\n    if bad:\n        y = x * 3",
        "y = x * 2 if t else x * 3",
        "y = x * 2 if t > 0 else x * 3",
        "y = x * 2 if not t and u > 0 else x * 3 + u",
        "y = x / u if t > 0 else x * 3",
        "y = x / 2 if t > 0 and u > 0 else x * 3 - u",
        "y = x * 2 if 0 < t < u else x * 3",
    ],
)
def test_a_value_that_python_may_give_in_another_run_is_no_safe_fix(body: str) -> None:
    code = f"import torch\ndef function(x, t, u, flag):\n    {body}\n    return y + 1\n"
    seen = {"x": torch.ones(3), "t": torch.tensor(1.0), "u": torch.tensor(2.0), "flag": True}
    with suppress(FixRefused):
        assert not proving.written_by(FIX, code, seen).rewrite.safe


@pytest.mark.parametrize("condition", ["work(x)", "x.sum() > work(x)"])
def test_what_may_give_a_value_of_python_is_refused(condition: str) -> None:
    code = f"""
def work(x):
    return x.sum() > 0
def function(x, t, flag):
    return (x * 2 if {condition} else x * 3) + 1
"""
    proving.refuses(
        FIX,
        code,
        {"x": torch.ones(3), "t": torch.tensor(1.0), "flag": True},
        "Assign it to a name first",
    )


HEAD = "import torch\ndef function(x, m):\n"


def _unseen(code: str) -> Rewrite:
    (match,) = proving.matches(FIX, code)
    tensors = {part: StaticValue(kind="tensor") for part in match.parts}
    return FIX.rewrite(match, Facts(static=tensors))


@pytest.mark.parametrize(
    "body",
    [
        "if x.sum() == 0:\n    return torch.ones_like(x, dtype=torch.float32)\nreturn x / m",
        "return torch.ones_like(x) if x.sum() == 0 else x * 0.5",
        "return (x * m if m.sum() > 0 else torch.zeros_like(x)) + 1",
        "if x.sum() > 0:\n    y = x @ m\nelse:\n    y = x * 2\nreturn y",
        "y = x * 2\nif y.sum() > 0:\n    y = y / m\nreturn y",
        "if x.sum() > 0:\n    z = x @ m\n    return x * 2\nreturn x * 3",
        "return x.float() * 2 if x.sum() > 0 else x * 3",
        "return x.view(2, 3) * 2 if x.sum() > 0 else x * 3",
    ],
)
def test_ways_that_may_differ_are_refused(body: str) -> None:
    with pytest.raises(FixRefused, match="the source does not show that both branches"):
        _unseen(proving.code_of(HEAD, body))


def test_products_of_tensors_are_refused_for_their_gradient() -> None:
    with pytest.raises(FixRefused, match="could make a gradient NaN"):
        _unseen(f"{HEAD}    return x * m if x.sum() > 0 else m + x\n")


@pytest.mark.parametrize("ways", [("x * 2", "x * 3"), ("x.sqrt()", "x * 0.5"), ("x + m", "m + x")])
@pytest.mark.parametrize("value", [0.0, 4.0, -1.0])
def test_ways_that_agree_are_written_and_compute_the_same(
    ways: tuple[str, str], value: float
) -> None:
    code = f"{HEAD}    return {ways[0]} if x.sum() > 0 else {ways[1]}\n"
    rewrite = _unseen(code)
    after = proving.text_of(rewrite)
    assert "torch.where(" in after
    for dtype in (torch.float32, torch.float16, torch.int64):
        x = torch.full((3,), value, dtype=dtype).requires_grad_(dtype.is_floating_point)
        assert proving.agree(rewrite, code, after, {"x": x, "m": torch.ones(2, 3)})
