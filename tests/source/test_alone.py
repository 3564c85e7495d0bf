"""Which functions of user code can run alone, and with which inputs."""

from __future__ import annotations

import ast

import pytest

from torchtrim.source.alone import AloneFunction, alone, named
from torchtrim.source.source import SourceFile

_HEAD = """
import json
import torch
import torch.nn.functional as F
from torch import Tensor, nn
import mine

IGNORE = -1
LIMIT = IGNORE + 4
MODEL = mine.build()


def helper(x: mine.Image):
    return x.clamp(max=LIMIT)


def noisy(x):
    print(x)
    return x

"""


def _of(text: str) -> AloneFunction | None:
    source = SourceFile("case.py", _HEAD + text)
    functions = [one for one in source.each(ast.FunctionDef) if one.name in ("function", "forward")]
    return alone(source, functions[0].body[0])


@pytest.mark.parametrize(
    "body",
    [
        "return F.relu(x) + LIMIT",
        "return helper(x)",
        "with torch.no_grad():\n        return x.sum()",
        "return torch.stack([nn.functional.relu(one) for one in x])",
        "return torch.linalg.norm(x).to(torch.float32)",
    ],
)
def test_functions_of_torch_constants_and_helpers_run_alone(body: str) -> None:
    found = _of(f"def function(x: Tensor, eps: mine.Number = 1) -> mine.Out:\n    {body}\n")
    assert found is not None
    assert list(found.inputs) == ["x"] or found.defaults == {"eps"}


@pytest.mark.parametrize(
    "body",
    [
        "print(x)",
        "return noisy(x)",
        "return MODEL(x)",
        "while x.sum() > 0: x = x - 1",
        "return json.dumps(x)",
        "global IGNORE",
        "torch.save(x, 'x.pt')",
        "torch.manual_seed(0)",
        "torch.set_default_dtype(torch.float64)",
        "torch.distributed.barrier()",
        "return torch.cuda.memory_allocated()",
        "x.share_memory_()",
        "return x.__class__",
        "x.backward()",
        "import os",
        "yield x",
        "return open(x)",
    ],
)
def test_effects_outside_the_function_keep_it_from_running_alone(body: str) -> None:
    assert _of(f"def function(x):\n    {body}\n    return x\n") is None


def test_attributes_that_a_method_reads_are_inputs() -> None:
    text = "class Loss(nn.Module):\n    def forward(self, x):\n        return x * self.scale + self.bias\n"
    found = _of(text)
    assert found is not None
    assert (sorted(found.inputs), found.bound, found.owner) == (
        ["self.bias", "self.scale", "x"],
        True,
        "Loss",
    )


@pytest.mark.parametrize("body", ["self.seen = x", "return self.net(x)", "return keep(self, x)"])
def test_methods_that_use_more_of_self_do_not_run_alone(body: str) -> None:
    text = f"class Net(nn.Module):\n    def forward(self, x):\n        {body}\n        return x\n"
    assert _of(text) is None


def test_a_parameter_counts_until_it_is_assigned() -> None:
    found = _of("def function(x):\n    x = x.float()\n    return x + x\n")
    assert found is not None
    assert len(found.inputs["x"]) == 1


def test_a_parameter_that_is_never_read_has_no_reads() -> None:
    found = _of("def function(x, unused):\n    return x + 1\n")
    assert found is not None
    assert found.inputs["unused"] == []


def test_constants_are_the_integers_of_its_code_and_of_what_it_uses() -> None:
    found = _of("def function(x):\n    return helper(x) + 7\n")
    assert found is not None
    assert found.constants >= {1, 4, 7}


def test_the_same_function_is_found_in_another_text() -> None:
    found = _of("def function(x):\n    return x + 1\n")
    assert found is not None
    other = named(SourceFile("case.py", "def function(x):\n    return x + 2\n"), found)
    assert other is not None
    assert named(SourceFile("case.py", "class A:\n    pass\n"), found) is None
