"""What an expression would give that did not run."""

from __future__ import annotations

import ast

import pytest

from torchtrim.records.seen import Seen
from torchtrim.source.source import Source
from torchtrim.source.typed import names_in, typed

X = Seen(kind="tensor", dtype="float16", device="cuda:0", shape=(2, 3), requires_grad=True)
Y = Seen(kind="tensor", dtype="int64", device="cuda:0", shape=(2,))
N = Seen(kind="float", value="2.5")


def of(text: str, before: str = "") -> object:
    source = Source("case.py", f"import torch\n{before}\n{text}\n")
    *_, last = source.tree.body
    assigns = [one for one in source.tree.body if isinstance(one, ast.Assign)]
    assert isinstance(last, ast.Expr)
    return typed(last.value, source, {"x": X, "y": Y, "self.n": N}, assigns)


@pytest.mark.parametrize(
    ("text", "dtype", "shape", "reached"),
    [
        ("0.0 * x.sum()", "float16", (), {"x"}),
        ("torch.zeros_like(x)", "float16", (2, 3), set()),
        ("x / self.n", "float16", (2, 3), {"x"}),
        ("x[:, 0] + y", "float16", (2,), {"x"}),
        ("torch.nn.functional.cross_entropy(x, y)", "float16", (), {"x"}),
        ("x.detach() * 2.0", "float16", (2, 3), set()),
        ("(y > 0)[..., None]", "bool", (2, 1), set()),
        ("torch.zeros((), device=x.device, dtype=torch.float32) + x.T.sum()", "float32", (), {"x"}),
    ],
)
def test_type_shape_and_gradient(
    text: str, dtype: str, shape: tuple[int, ...], reached: set[str]
) -> None:
    assert of(text) == (dtype, shape, reached)


def test_assignments_before_are_followed() -> None:
    assert of("z.sum() + w", "z = x * 2\nw = z.mean()") == ("float16", (), {"x"})


@pytest.mark.parametrize(
    "text",
    [
        "unknown * 2",
        "x.item()",
        "x + torch.randn(3)",
        "x[y]",
        "x.view(7)",
        "self.n / 2",
        "torch.zeros(3)",
        "f(x)",
    ],
)
def test_what_is_not_known_or_raises_is_nothing(text: str) -> None:
    assert of(text) is None


def test_names_are_the_outermost_and_no_modules() -> None:
    source = Source("case.py", "import torch\ntorch.add(self.a.b, x[i].c(d=z), alpha=2)\n")
    assert [ast.unparse(one) for one in names_in(source.tree.body[1], source)] == [
        "self.a.b",
        "x",
        "i",
        "z",
    ]
