"""Fixes without a run: what the source does not say of an operand is not assumed."""

from __future__ import annotations

import ast

import pytest

from torchtrim.linter.kinds import ValueKind
from torchtrim.linter.static_syncs import static_syncs
from torchtrim.linter.text import fixed_text, lint_source, static_values
from torchtrim.rewriter.fix import matches
from torchtrim.source.source import SourceFile

HEAD = "import torch\n\n\ndef f(x: torch.Tensor, mask: torch.BoolTensor, t: torch.Tensor, a, n: int):\n"


def code_of(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


GUESSES = {
    "a loop variable": "for i in range(n):\n    k = min(x[i], a[i])",
    "what a function returns": "keep = nms(x, a)\na.extend(x[keep].cpu().tolist())",
    "a tuple": "a.extend(x[mask.nonzero(as_tuple=True)].cpu().tolist())",
    "a slice": "i = slice(n)\na.extend(x[i].tolist())",
    "an argument": "a.append(x[a].item())",
    "an integer": "a.append(x[n].item())",
    "a vector": "return x[a.order].cpu() + 1",
    "rows of a list": "return a[t.item()] + 1",
    "a float made whole": "return x[int(t)] + 1",
    "bound anew in the loop": "i = x.argmax()\nfor _ in a:\n    y = x[i] * 2\n    i = nms(x)",
    "a number of Python's in it": "return x + min(t.sum(), n - 1) + 1",
    "a sum of the host": "a += t.sum().item()\nreturn a",
    "a factor of no known type": "return a * t.sum().item() + 1",
    "a copy that stays": "a[n] = x.detach().cpu()",
    "an index that is read": "x[n, t.sum().item() :] = 0",
    "a list that is read": "return [int(one) for one in t.tolist()]",
    "tensors in a list": "y = [x.sum(), t.sum()]\nfor one in y:\n    a.append(one.item())",
    "another mask than the index": "a.y[a.z] = x[mask]",
    "what was selected before": "y = a.z[mask]\nx[mask] = t.to(x.device)[y]",
    "an index by a mask": "x[t[mask]] = -1",
    "a flag before": "return x * 2 if a and t.sum() > 0 else x * 3",
    "a flag behind": "if t.sum() > 0 or a.flag:\n    x = x * 2\nelse:\n    x = x * 3\nreturn x",
    "None before": "return x * 2 if a is not None and t.sum() > 0 else x * 3",
    "ways of no known type": "y = a\nif t.sum() > 0:\n    y = a / 2\nreturn y + 1",
}


@pytest.mark.parametrize("body", GUESSES.values(), ids=GUESSES)
def test_a_guess_is_not_written(body: str) -> None:
    code = code_of(body)
    assert fixed_text("model.py", code, unsafe=True)[0] == code


def test_what_is_uploaded_is_not_guessed() -> None:
    """`a.rows` may be a number or a list."""
    code = code_of("return torch.tensor(a.rows, device=x.device)")
    assert fixed_text("model.py", code, unsafe=True)[0] == code


KNOWN = {
    "i = x.argmax()\nreturn x[i] + 1": "x[i.view(1)][0]",
    "for _ in a:\n    i = x.max(0).indices.argmax()\n    y = x[i] * 2": "x[i.view(1)][0]",
    "return x[t.item()] * 2": "x[t.view(1)][0]",
    "return x[int(t.argmin())] * 2": "x[t.argmin().view(1)][0]",
    "return max(x.sum(), t.sum()) + 1": "torch.where(",
    "return x * t.sum().item()": "x * t.sum().detach()",
    "x[t.argsort()] = 0": "x.new_full((), 0)",
    "return [one.item() for one in t]": "t.flatten().tolist()",
    "return torch.as_tensor(n, device=x.device)": "torch.full((), n",
    "m = x > 0\nx[m] = x[m] * n": "torch.where(m,",
    "assert (x > 0).all().item()": "torch._assert_async((x > 0).all())",
    "return x * 2 if 0 < t.sum() < 9 and not mask.any() else x * 3": ") & (~mask.any())",
}


@pytest.mark.parametrize(("body", "written"), KNOWN.items())
def test_what_the_source_says_is_written(body: str, written: str) -> None:
    text, applied = fixed_text("model.py", code_of(body), unsafe=True)
    assert applied == 1
    assert written in text


SUMS = {
    "an attribute": "for one in a:\n    self.total += x[n].sum().item()",
    "global": "global total\nfor one in a:\n    total += x.sum().item()",
    "nonlocal": "y = 0.0\ndef g():\n    nonlocal y\n    for one in a:\n        y += x.sum().item()",
    "tried": "y = 0.0\ntry:\n    for one in a:\n        y += x.sum().item()\nexcept ValueError:\n    pass",
    "broken off": "y = 0.0\nfor one in a:\n    y += x.sum().item()\n    if one: break\nelse:\n    y += 1",
    "an argument": "for one in a:\n    n += x.sum().item()\nreturn n",
    "an entry": "for one in a:\n    a['loss'] += x.sum().item()",
    "once": "self.total = self.total + x.sum().item()",
}


@pytest.mark.parametrize("newline", ["\n", "\r"])
@pytest.mark.parametrize("body", SUMS.values(), ids=SUMS)
def test_a_sum_that_must_stay_a_number_is_written_by_no_fix(body: str, newline: str) -> None:
    code = code_of(body).replace("x: torch", "self, x: torch").replace("\n", newline)
    assert fixed_text("model.py", code, unsafe=True)[0] == code
    found = [one.candidate for one in lint_source(SourceFile("model.py", code))]
    named = body.partition(" +=")[0].split()[-1].isidentifier()
    assert [one.rank for one in found if one] == ["refused" if named else "advice"]


def test_a_fix_is_offered_only_where_its_own_sync_is() -> None:
    code = code_of(
        "y: list[int] = x.tolist()\nz = x[n], x.argmax().item()\nreturn x[n].cpu(), y, z"
    )
    for one in lint_source(SourceFile("model.py", code)):
        assert one.candidate is None or one.candidate.match.fix.name != "row_by_index"


def test_what_is_static_values_parts() -> None:
    code = code_of("i = x.argmax()\nx[i.item()] = a.b\nx[mask[n].item()] = n")
    source, kinds = SourceFile("model.py", code), dict[ast.AST, ValueKind]()
    static_syncs(source.tree, "model.py", kinds=kinds)
    told = [
        (match.text(part), vars(one))
        for match in matches(source, {"TT103"})
        if match.fix.name == "index_assignment"
        for part, one in static_values(match, kinds).items()
    ]
    known = dict(told)
    assert known["x"] == {"kind": "tensor"}
    assert known["a.b"] == {}
    assert str.__eq__(known["n"]["kind"], "plain")
