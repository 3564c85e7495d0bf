"""Types, shapes and gradients of expressions that did not run."""

from __future__ import annotations

import ast
import itertools

import pytest
import torch

from torchtrim.records.probes import ObservedValue
from torchtrim.source.nodes import name_set
from torchtrim.source.source import SourceFile
from torchtrim.source.typed import common_form, operands_in, typed

X = ObservedValue(kind="tensor", dtype="float16", device="cuda:0", shape=(2, 3), requires_grad=True)
Y = ObservedValue(kind="tensor", dtype="int64", device="cuda:0", shape=(2,))
N = ObservedValue(kind="float", value="2.5")


def of(text: str, before: str = "") -> object:
    source = SourceFile("case.py", f"import torch\n{before}\n{text}\n")
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


def test_what_is_not_known_or_raises_is_nothing() -> None:
    texts = "unknown * 2; x.item(); x + torch.randn(3); x[y]; x.view(7); self.n / 2; torch.zeros(3); f(x)"
    assert {text: of(text) for text in texts.split("; ")} == dict.fromkeys(texts.split("; "))


def test_names_are_the_outermost_and_no_modules() -> None:
    source = SourceFile("case.py", "import torch\ntorch.add(self.a.b, x[i].c(d=z), alpha=2)\n")
    names = [ast.unparse(one) for one in operands_in(source.tree.body[1], source)]
    assert names == ["self.a.b", "x", "i", "z"]


SOURCE = SourceFile("case.py", "import torch\n")
WAYS = """
x; x * 2; x * 3; x + 1; x - 1; 2 - x; 3 - x; x * 0.5; 0.5 - x; x / 2; 2 / x; x * 2 * 0.5; -x
-(x * 2); x.exp(); torch.sqrt(x); x.clone(); x * x; x + x; x - x; x.detach() * 2
torch.zeros_like(x); torch.ones_like(x); torch.ones_like(x, dtype=torch.float32); x + y; y + x
x * y; x - y; y - x; x / y; y / x; x * 2 + y; (x + y) * 2; x * 0.5 - y; y - x * 2
torch.zeros_like(y); x.sum(); x.sum() * 2; x.mean(); x * 300; x + 2; x @ y; x @ y * 2; x > 0
torch.zeros_like(x) + y; torch.zeros_like(x) - y; -x * 2; x.tanh() * 2; torch.log(x) + 1; 1 - x * 2
""".replace("\n", ";")
TEXTS = sorted({text.strip() for text in WAYS.split(";")} - {""})
TYPES = sorted(name_set("bool uint8 int8 int32 int64 float16 bfloat16 float32 float64 complex64"))
SHAPES = ((), (3,), (2, 3))

Given = tuple[object, ...]


def _given(text: str, x: torch.Tensor, y: torch.Tensor) -> Given:
    try:
        result = eval(text, {"torch": torch, "x": x, "y": y})
    except (RuntimeError, TypeError):
        return ("raises",)
    return result.dtype, result.shape, result.requires_grad, _reached(result, x, y)


def _reached(result: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Given:
    leaves = [one for one in (x, y) if one.requires_grad]
    if not result.requires_grad:
        return tuple(False for _ in leaves)
    ones = torch.ones_like(result)
    found = torch.autograd.grad(result, leaves, ones, allow_unused=True)
    return tuple(one is not None for one in found)


def _inputs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = []
    for one, other in itertools.product(TYPES, repeat=2):
        for number, shape in enumerate(SHAPES):
            x = torch.ones(shape, dtype=getattr(torch, one))
            y = torch.ones(
                SHAPES[number - 1 if one < other else number], dtype=getattr(torch, other)
            )
            graded = [z for z in (x, y) if z.is_floating_point()]
            made.append((x, y))
            for z in graded:
                z.requires_grad_()
    return made


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_has_one_form_agrees() -> None:
    trees = {text: ast.parse(text, mode="eval").body for text in TEXTS}
    every = itertools.combinations(TEXTS, 2)
    pairs = [(a, b) for a, b in every if common_form(trees[a], trees[b], SOURCE) is not None]
    assert len(pairs) > 40
    inputs = _inputs()
    texts = {text for pair in pairs for text in pair}
    given = {text: [_given(text, x, y) for x, y in inputs] for text in texts}
    assert {f"{one}, {other}" for one, other in pairs if given[one] != given[other]} == set()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("torch.ones_like(n, dtype=torch.float32)", "n / d"),
        ("torch.ones_like(n)", "n * 0.5"),
        ("torch.zeros_like(n)", "n * 1"),
        ("n.detach()", "n.clone()"),
        ("a * m", "torch.zeros_like(a)"),
        ("a @ m", "a * 2"),
        ("x / 2", "x * 2"),
        ("x.sum()", "x.mean()"),
        ("x.view(2, 3)", "x * 1"),
        ("x.float() * 2", "x * 2"),
    ],
)
def test_what_may_differ_has_no_common_form(one: str, other: str) -> None:
    ways = [ast.parse(text, mode="eval").body for text in (one, other)]
    assert common_form(*ways, SOURCE) is None
