"""What a condition says of its branches."""

from __future__ import annotations

import ast

import pytest

from torchtrim.linter.guards import guard
from torchtrim.linter.kinds import ARRAY, PLAIN, tensor


def said(text: str) -> tuple[bool, bool]:
    found = guard(ast.parse(text, mode="eval").body)
    return found.true, found.false


@pytest.mark.parametrize(
    ("text", "true", "false"),
    [
        ("TYPE_CHECKING", True, False),
        ("torch.jit.is_scripting()", True, False),
        ("not torch.compiler.is_compiling()", False, True),
        ("x.is_cuda", False, True),
        ("not x.is_cuda", True, False),
        ("x.device.type == 'cpu'", True, False),
        ("x.device.type != 'cpu'", False, True),
        ("x.device == torch.device('cuda')", False, True),
        ("device in ('cpu', 'mps')", True, False),
        ("device in ('cpu', 'cuda')", False, False),
        ("torch.cuda.is_available()", False, True),
        ("x.is_cuda and flag", False, False),
        ("flag and not x.is_cuda", True, False),
        ("x.is_cuda or flag", False, True),
        ("is_tracing() or is_scripting()", True, False),
        ("is_tracing() or flag", False, False),
        ("flag", False, False),
        ("x.kind == 'cpu'", False, False),
        ("1 < device < 'cpu'", False, False),
    ],
)
def test_which_branch_no_device_runs(text: str, true: bool, false: bool) -> None:
    assert said(text) == (true, false)


def test_what_a_name_is_in_a_branch() -> None:
    tested = guard(ast.parse("isinstance(x, np.ndarray)", mode="eval").body)
    assert (tested.when_true, tested.when_false) == ((("x", ARRAY),), ())
    tested = guard(ast.parse("not isinstance(x, torch.Tensor)", mode="eval").body)
    assert (tested.when_true, tested.when_false) == ((("x", PLAIN),), (("x", tensor()),))
    tested = guard(ast.parse("isinstance(x, int | float) and flag", mode="eval").body)
    assert tested.when_true == (("x", PLAIN),)
    assert guard(ast.parse("isinstance(x, Thing)", mode="eval").body).when_true == ()
