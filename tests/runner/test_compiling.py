"""Scripts whose `torch.compile` stays on."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.capture.watch import Listener, Watcher
from torchtrim.dispatch.modes import enter_below, leave
from torchtrim.records.budget import memory_limit
from torchtrim.records.files import save_plan
from torchtrim.records.plan import CompiledGraph
from torchtrim.records.trial import Request
from torchtrim.runner.compiling import Applying, CompileLog, OnCompile
from torchtrim.runner.script import Script
from torchtrim.workflows.compiled import optimize_compiled

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)]
model = nn.Sequential(*layers, nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
compiled = torch.compile(model)
for _ in range(6):
    compiled(torch.randn(4096, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("cached:", *torch._dynamo.utils.counters["aot_autograd"].items())
"""


def test_the_first_compile_is_noticed_and_other_backends_run_eagerly() -> None:
    calls: list[int] = []
    watch = OnCompile(lambda: calls.append(1), ("inductor",))
    original = torch.compile
    watch.install()
    try:
        torch.compile(nn.Linear(2, 2), backend="aot_eager")
        assert not calls
        torch.compile(nn.Linear(2, 2))
        torch.compile(nn.Linear(2, 2))
    finally:
        watch.remove()
    assert calls == [1]
    assert watch.asked == {"aot_eager", "inductor"}
    assert torch.compile is original


def test_modules_that_compile_themselves_run_eagerly() -> None:
    watch, layer = OnCompile(), nn.Linear(2, 2)
    watch.install()
    try:
        layer.compile()
        layer.compile(backend="aot_eager", fullgraph=True)
    finally:
        watch.remove()
    assert layer._compiled_call_impl is None
    assert watch.asked == {"inductor", "aot_eager"}


def test_a_mode_that_begins_inside_an_eager_compiled_function_sees_what_follows() -> None:
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    watch, mode, value = OnCompile(), Seen(), torch.ones(2)
    watch.install()
    try:

        @torch.compile
        def begin() -> None:
            enter_below(mode)

        begin()
        value.add(1)
        torch.compile(functools.partial(leave, mode))()
        value.mul(2)
    finally:
        watch.remove()
        leave(mode)
    assert begin.__name__ == "begin"
    assert seen == ["add"]


def test_a_script_that_compiles_nothing_does_not_meet_its_plan() -> None:
    applying = Applying((CompiledGraph(graph="a", saves=()),), Watcher(Listener()))
    applying.install()
    applying.remove()
    assert "compiled nothing" in applying.missed()


def test_programs_that_compile_nothing_import_no_inductor() -> None:
    code = "import sys, torchtrim.runner.worker, torchtrim.workflows.optimize.report\n"
    code += "assert not [one for one in sys.modules if one.startswith('torch._inductor')]"
    subprocess.run([sys.executable, "-c", code], check=True)


def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
    return x * by


def test_functions_compiled_in_several_steps_are_known_with_what_had_changed() -> None:
    torch._dynamo.reset()
    log = CompileLog(str(Path(__file__).parent))
    sizes = torch.compile(nn.Linear(4, 4), backend="eager", dynamic=False)
    numbers = torch.compile(scaled, backend="eager", dynamic=False)
    once = torch.compile(lambda x: x + 1, backend="eager")
    for step in range(3):
        log.begin()
        sizes(torch.randn(3 + step, 4))
        numbers(once(torch.ones(2)), 2 + step)
    layer, function = log.found()
    assert "size mismatch at index 0. expected 4, actual 5" in layer.guard
    assert (layer.function, layer.path, layer.line) == ("", "", 0)
    assert (function.function, function.guard) == ("scaled", "by == 3")
    assert (function.path, function.line) == (__file__, scaled.__code__.co_firstlineno + 1)
    assert function.steps == function.watched == layer.steps == 3
    assert function.seconds > 0


def broken(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


def test_a_graph_break_is_known_by_its_line() -> None:
    torch._dynamo.reset()
    log = CompileLog(str(Path(__file__).parent))
    log.begin()
    torch.compile(scaled, backend="eager")(torch.ones(2), 2)
    torch.compile(broken, backend="eager")(torch.ones(2))
    (rest,) = log.found()
    assert (rest.function, rest.path) == ("broken", __file__)
    assert rest.line == broken.__code__.co_firstlineno + 2
    assert rest.broken


@pytest.mark.slow
def test_a_script_that_compiles_fits_and_a_second_run_is_the_cached_plan(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    limit = memory_limit("80%", "allocated")
    result = optimize_compiled(Script(str(path)), limit, Request(steps=2), print)
    report = result.report
    assert report.certificate is not None
    assert report.certificate.verdict in ("BITWISE", "ROUNDING")
    assert report.planned is not None
    assert report.original is not None
    assert report.planned.peak_bytes <= 0.8 * report.original.peak_bytes
    assert result.plan is not None
    assert len(result.plan.compiled) == 1
    plan = tmp_path / "plan.toml"
    save_plan(result.plan, plan)
    for hits in ("autograd_cache_miss", "autograd_cache_hit"):
        ran = _run(plan, path, tmp_path / "cache")
        assert hits in ran.stdout, ran.stderr
        assert "within the budget" in ran.stderr
        assert "NOT FITTED" not in ran.stderr


def _run(plan: Path, script: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a script by its plan, with a cache of compiled code in a folder."""
    command = [sys.executable, "-m", "torchtrim", "run", "--plan", str(plan), str(script)]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)
