"""Whether a step follows a backward, told in the backward from the program's source."""

from __future__ import annotations

import itertools
import linecache
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchtrim.capture.code.step_paths import Follows, step_follows

_NUMBERS = itertools.count()

WORLD = """
import contextlib, math, types
import torch

class Trainer:
    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer
    def update(self):
        self.optimizer.step()
    def finish(self, loss):
        loss.backward()
        self.update()

def stepped(optimizer):
    optimizer.step()

def backed(loss):
    loss.backward()

def unused(optimizer):
    return None
"""


def _hook(does: Callable[[], None]) -> Any:
    """A hook whose frames are taken for the library's own."""

    def hook(_: torch.Tensor) -> None:
        does()

    return _ours(hook, does=_ours(does))


def _ours(function: Any, **closure: Any) -> Any:
    cells = tuple(
        types.CellType(closure[name]) if name in closure else cell
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
    )
    names = {**globals(), "__name__": "torchtrim.hook"}
    return types.FunctionType(function.__code__, names, closure=cells)


def told(body: str, *, source: bool = True, **settings: Any) -> list[Follows]:
    """Run a function with this body; return what each of its backwards was told."""
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: list[Follows] = []
    net.weight.register_hook(_hook(lambda: found.append(step_follows(optimizer))))
    given = {"net": net, "optimizer": optimizer, "x": torch.ones(3, 2), **settings}
    text = f"{WORLD}\ndef main({', '.join(given)}):\n{textwrap.indent(body, '    ')}\n"
    name = f"/nowhere/steps_{next(_NUMBERS)}.py"
    if source:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, name, "exec"), names)
    result = names["main"](**given)
    if isinstance(result, types.GeneratorType):
        list(result)
    return found


BACK = "loss = net(x).sum()\nloss.backward()\n"


def in_loop(body: str, before: str = "") -> str:
    return f"{before}\nfor i in range(2):\n{textwrap.indent(BACK + body, '    ')}"


SURE = {
    "plain": BACK + "optimizer.step()",
    "zero_grad after": BACK + "optimizer.step()\noptimizer.zero_grad()",
    "helper": BACK + "stepped(optimizer)",
    "helper by keyword": BACK + "stepped(optimizer=optimizer)",
    "method": BACK + "trainer.update()",
    "all in a method": "trainer.finish(net(x).sum())",
    "loop over optimizers": BACK + "for one in [optimizer]:\n    one.step()",
    "values": BACK + "for one in table.values():\n    one.step()",
    "unpacked": "one, other = optimizer, 1\n" + BACK + "one.step()",
    "with": BACK + "with contextlib.nullcontext():\n    optimizer.step()",
    "backward in with": "with contextlib.nullcontext():\n    loss = net(x).sum()\n    loss.backward()\n"
    "optimizer.step()",
    "try": BACK + "try:\n    optimizer.step()\nfinally:\n    pass",
    "finally": "try:\n    loss = net(x).sum()\n    loss.backward()\nfinally:\n    optimizer.step()",
    "setting": BACK + "if yes:\n    optimizer.step()",
    "setting by name": BACK + "if none is None:\n    optimizer.step()",
    "not a setting": BACK + "if not no:\n    optimizer.step()",
    "both branches": BACK + "if loss > 0:\n    optimizer.step()\nelse:\n    optimizer.step()",
    "in a loop": in_loop("optimizer.step()"),
    "counted": in_loop("if (i + 1) % 2 == 0:\n    optimizer.step()"),
    "counted by continue": in_loop("if (i + 1) % 2:\n    continue\noptimizer.step()"),
    "in a helper": "backed(net(x).sum())\noptimizer.step()",
    "nested function": "def inner():\n    net(x).sum().backward()\ninner()\noptimizer.step()",
    "scaler off": BACK + "scaler.step(optimizer)",
    "shape": BACK + "size = net.weight.shape\noptimizer.step()",
    "logging": BACK + "value = loss.item()\noptimizer.step()",
}

OPEN = {
    "none": BACK,
    "another's": BACK + "unused(optimizer)",
    "isfinite": BACK + "if math.isfinite(loss.item()):\n    optimizer.step()",
    "flag": in_loop("ok = loss > 0\nif ok:\n    optimizer.step()", "ok = True"),
    "setting that is off": BACK + "if no:\n    optimizer.step()",
    "return": BACK + "if loss > 0:\n    return\noptimizer.step()",
    "break": in_loop("if loss > 0:\n    break\noptimizer.step()"),
    "continue": in_loop("if loss > 0:\n    continue\noptimizer.step()"),
    "raise": BACK + "if loss > 99:\n    raise ValueError\noptimizer.step()",
    "assert": BACK + "assert loss < 99\noptimizer.step()",
    "yield": BACK + "yield loss\noptimizer.step()",
    "exit": BACK + "if loss > 99:\n    exit()\noptimizer.step()",
    "short circuit": BACK + "loss > 0 and optimizer.step()",
    "conditional": BACK + "optimizer.step() if loss > 0 else None",
    "lambda": BACK + "f = lambda: optimizer.step()",
    "a function not called": BACK + "def f():\n    optimizer.step()",
    "a while": BACK + "while loss > 99:\n    optimizer.step()",
    "scaler on": "scaling.scale(net(x).sum()).backward()\nscaling.step(optimizer)",
    "clipping": BACK + "torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\noptimizer.step()",
    "weights in a test": BACK + "if net.weight.norm() > 9:\n    pass\noptimizer.step()",
    "weights used": BACK + "norm = net.weight.norm()\noptimizer.step()",
    "module used": BACK + "net(x)\noptimizer.step()",
    "state_dict": BACK + "net.state_dict()\noptimizer.step()",
    "weights in a loop": BACK + "for one in net.parameters():\n    one.sum()\noptimizer.step()",
    "returned early by a helper": "def update(v):\n    if v > 99:\n        raise ValueError\n"
    "    optimizer.step()\n" + BACK + "update(loss)",
}


def settings() -> dict[str, Any]:
    net = nn.Linear(2, 1)
    return {
        "yes": True,
        "no": False,
        "none": None,
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "scaling": torch.amp.GradScaler("cpu", enabled=True),
        "other": torch.optim.SGD(net.parameters(), lr=0.1),
    }


def told_of(body: str) -> list[Follows]:
    given = settings()
    prelude = "trainer, table = Trainer(net, optimizer), {'a': optimizer}\n"
    return told(prelude + body, **given)


@pytest.mark.parametrize("body", SURE.values(), ids=SURE)
def test_a_step_follows(body: str) -> None:
    found = told_of(body)
    assert found
    assert all(one.sure for one in found), found


@pytest.mark.parametrize("body", OPEN.values(), ids=OPEN)
def test_a_step_may_not_follow(body: str) -> None:
    found = told_of(body)
    assert found
    assert all(not one.sure and one.why_not for one in found), found


def test_another_optimizers_step_is_none() -> None:
    assert not told_of(BACK + "other.step()")[0].sure


def test_the_last_backward_of_a_step_at_the_top_of_the_loop_is_left() -> None:
    body = "for i in range(2):\n    optimizer.step()\n    optimizer.zero_grad()\n    net(x).sum().backward()"
    found = told_of(body)
    assert len(found) == 2
    assert not found[-1].sure


def test_code_without_source_is_open() -> None:
    found = told(BACK + "optimizer.step()", source=False)
    assert [one.sure for one in found] == [False]
    assert "cannot be read" in found[0].why_not


def test_outside_a_backward_nothing_is_found() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    assert not step_follows(optimizer).sure
