"""What an expression is."""

from __future__ import annotations

import ast

import pytest

from torchtrim.linter.infer import KindInference
from torchtrim.linter.kinds import (
    ARRAY,
    LAYER,
    NUMBERS,
    PLAIN,
    UNKNOWN,
    ValueKind,
    device,
    function,
    places,
    sequence,
    singled,
    tensor,
)
from torchtrim.linter.scope import FileFacts, guard
from torchtrim.linter.static_syncs import static_syncs

IMPORTS = {"torch": "torch", "F": "torch.nn.functional", "nn": "torch.nn", "np": "numpy"}
NAMES = {
    "x": tensor("device"),
    "m": tensor("device", "bool"),
    "i": tensor("device", "int"),
    "h": tensor("host"),
    "n": PLAIN,
    "layer": LAYER,
}
DEVICE, HOST = tensor("device"), tensor("host")


def value(text: str) -> ValueKind:
    infer = KindInference(FileFacts(imports=dict(IMPORTS)), lambda row, node: None)
    infer.env = dict(NAMES)
    return infer.value(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x + 1", DEVICE),
        ("-x.mT", DEVICE),
        ("x > 0", tensor("device", "bool")),
        ("m & ~m", tensor("device", "bool")),
        ("i % 2", tensor("device", "int")),
        ("i / 2", DEVICE),
        ("x.sum()", singled(DEVICE)),
        ("x.sum(1)", DEVICE),
        ("m.any()", singled(tensor("device", "bool"))),
        ("x.max(1)", sequence(DEVICE)),
        ("x.max(1).values", DEVICE),
        ("x.max()", singled(DEVICE)),
        ("torch.max(x, x)", DEVICE),
        ("torch.max(x, other)", DEVICE),
        ("torch.max(x, self.dim)", sequence(DEVICE)),
        ("x.shape[0]", PLAIN),
        ("x.size(0)", PLAIN),
        ("x.tolist()", NUMBERS),
        ("x.cpu().numpy()", ARRAY),
        ("x.to(h)", HOST),
        ("h.to(x.device)", DEVICE),
        ("x.to(torch.bool)", tensor("device", "bool")),
        ("torch.zeros(3)", HOST),
        ("torch.zeros(3, device=x.device)", DEVICE),
        ("torch.zeros_like(x)", DEVICE),
        ("torch.arange(n)", HOST),
        ("torch.cat([h, h])", HOST),
        ("h + unknown", tensor("mixed")),
        ("torch.topk(x, 2)", sequence(DEVICE)),
        ("F.softmax(x, -1)", DEVICE),
        ("F.cross_entropy(x, i)", singled(DEVICE)),
        ("F.cross_entropy(x, i, reduction='none')", DEVICE),
        ("nn.Linear(3, 3)", LAYER),
        ("layer(x)", tensor()),
        ("np.ones(3) * 2", ARRAY),
        ("x.device", device("device")),
        ("x is None", PLAIN),
        ("x == 'mean'", PLAIN),
        ("[x, x]", sequence(DEVICE)),
        ("[t for t in (h, h)]", sequence(HOST)),
        ("unknown", UNKNOWN),
        ("unknown(x)", UNKNOWN),
        ("unknown.unsqueeze(0)", tensor()),
        ("unknown.nonzero()", UNKNOWN),
        ("x if n else unknown", UNKNOWN),
        ("x if n else None", DEVICE),
        ("len(x)", PLAIN),
        ("max(n, 3)", PLAIN),
        ("(x, n)", places([DEVICE, PLAIN])),
        ("(x, n)[1]", PLAIN),
        ("(x, x)", sequence(DEVICE)),
        ("getattr(n, 'a', None) or n", PLAIN),
        ("getattr(other, 'a')", UNKNOWN),
        ("n or x", UNKNOWN),
        ("lambda: x", function(gives=DEVICE)),
    ],
)
def test_kinds_of_expressions(text: str, kind: ValueKind) -> None:
    assert value(text) == kind


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("one, two = (x.relu(), len(x.shape))[::-1]\n    return 1 if one > 3 else two", []),
        ("rest = (x.relu(), 3, 4)[1:]\n    return 1 if rest[0] > 3 else 2", []),
        ("one, two = (x.relu(), x.sin())[::-1]\n    return 1 if one > 3 else two", ["item"]),
    ],
)
def test_a_part_of_a_tuple_has_other_places(line: str, rows: list[str]) -> None:
    text = f"import torch\ndef f(x: torch.Tensor):\n    {line}\n"
    assert [one.row for one in static_syncs(ast.parse(text), "m.py", text=text)] == rows


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


def lines(text: str) -> list[int]:
    return [one.node.lineno for one in static_syncs(ast.parse(text), "model.py")]


@pytest.mark.parametrize(
    ("name", "body", "found"),
    [
        ("init_codes", "if self.done:\n            return", [8]),
        ("init_codes", "'Once.'\n        if not self.done: return None", [9]),
        ("reset_parameters", "if self.done:\n            return", []),
        ("init_codes", "if self.done:\n            pass", []),
        ("init_codes", "self.x = 0\n        if self.done: return", []),
    ],
)
def test_what_asks_first_whether_it_has_run_is_called_in_each_step(
    name: str, body: str, found: list[int]
) -> None:
    code = f"""
import torch
from torch import nn, tensor
class A(nn.Module):
    def __init__(self):
        self.register_buffer("done", tensor(False))
    def {name}(self, x: torch.Tensor):
        {body}
        x.item()
"""
    assert lines(code) == found


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("x[:, use, ...]", True),
        ("x[n, :]", False),
        ("x[use]", False),  # a tuple of numbers indexes without a copy
        ("torch.normal(0, x)", True),
        ("torch.normal(mean=0.0, std=x + 1)", True),
        ("torch.normal(0.0, 1.0, (3,))", False),
        ("torch.normal(x, 1.0)", False),
    ],
)
def test_indices_and_deviations_that_the_host_waits_for(line: str, waits: bool) -> None:
    code = f"import torch\ndef f(x: torch.Tensor, n: int):\n    use = list(range(n))\n    return {line}\n"
    assert lines(code) == [4] * waits


@pytest.mark.parametrize(("head", "found"), [("seen = {}", [5]), ("seen = self.seen", [])])
def test_a_dictionary_of_the_function_is_no_cache(head: str, found: list[int]) -> None:
    body = f"    {head}\n    if n not in seen:\n        seen[n] = x.item()\n"
    code = f"import torch\ndef f(self, x: torch.Tensor, n):\n{body}"
    assert lines(code) == found
