"""Looking at what expressions hold, without changing what the code does."""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtrim
from torchtrim.capture.probes import LOOK, Probes, Sources
from torchtrim.emulator import emulate
from torchtrim.records.probes import Probe, ProbeResult, SourceSpan


def spots(text: str, *wanted: str) -> dict[str, SourceSpan]:
    """Where these expressions stand."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.expr) and ast.get_source_segment(text, node) in wanted:
            spot = (node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)
            found[str(ast.get_source_segment(text, node))] = spot
    return found


def looked(
    text: str, *wanted: str, times: int = 1, space: dict[str, Any] | None = None
) -> ProbeResult:
    probes = Probes([Probe(number=0, path="case.py", parts=spots(text, *wanted))])
    probes.install()
    try:
        code = compile(probes.instrument("case.py", ast.parse(text)), "case.py", "exec")
        for _ in range(times):
            exec(code, {"torch": torch} if space is None else space)
    finally:
        probes.remove()
    (found,) = probes.observed()
    return found


def test_a_tensor_is_seen_with_type_shape_and_share() -> None:
    found = looked(
        "y = x[m]", "x", "m", space={"x": torch.ones(4, 2), "m": torch.tensor([True, False] * 2)}
    )
    (execution,) = found.executions
    assert execution.values["x"].dtype == "float32"
    assert execution.values["x"].shape == (4, 2)
    assert execution.values["m"].share == 0.5
    assert execution.values["x"].storage != execution.values["m"].storage


def test_executions_that_are_alike_are_counted_together() -> None:
    found = looked("for n in (1, 1, 2):\n    y = torch.ones(n) + 1", "torch.ones(n)", "1")
    assert [(one.values["torch.ones(n)"].shape, one.count) for one in found.executions] == [
        ((1,), 2),
        ((2,), 1),
    ]


def test_views_share_a_storage() -> None:
    found = looked("y = (x, x[0])", "x", "x[0]", space={"x": torch.ones(2, 2)})
    values = found.executions[0].values
    assert values["x"].storage == values["x[0]"].storage


def test_too_many_kinds_of_executions_are_said_to_be_capped() -> None:
    found = looked("for n in range(600):\n    y = n + 1", "n")
    assert found.capped
    assert len(found.executions) == 500


def test_the_emulated_device_does_not_see_the_look() -> None:
    with emulate():
        x = torch.ones(4, 2).cuda()
        m = x[:, 0] > 0
        seen: list[ProbeResult] = []

        def call() -> None:
            seen.append(looked("y = torch.where(m, 1, 0)", "m", space={"m": m, "torch": torch}))

        assert torchtrim.measure(call).waits == ()
    values = seen[0].executions[0].values
    assert values["m"].device == "cuda:0"
    assert values["m"].share == 1.0


def test_what_is_assigned_to_is_not_wrapped() -> None:
    space: dict[str, Any] = {"x": torch.zeros(3)}
    looked("x[1] = 5\nx = x + 1", "x", "x[1]", space=space)
    assert space["x"].tolist() == [1, 6, 1]
    assert LOOK not in vars(__import__("builtins"))


def test_a_file_runs_with_another_text_and_what_it_imports_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, helper = tmp_path / "script.py", tmp_path / "helper_of_case.py"
    script.write_text("import helper_of_case\nprint('old', helper_of_case.value)\n")
    helper.write_text("value = 'old'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    texts = {
        str(script): script.read_text().replace("old", "new"),
        str(helper): "value = 'new'\n",
    }
    sources = Sources(texts, Probes(()), ())
    sources.install()
    sources.run(str(script))
    assert capsys.readouterr().out == "new new\n"
    assert script.read_text().startswith("import helper_of_case\nprint('old'")
    sys.modules.pop("helper_of_case")


def test_a_traceback_names_the_line_of_the_new_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("pass\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    text = textwrap.dedent("""
        def fails():
            raise ValueError("here")
        fails()
    """)
    sources = Sources({str(script): text}, Probes(()), ())
    sources.install()
    with pytest.raises(ValueError, match="here") as caught:
        sources.run(str(script))
    assert caught.traceback[-1].lineno == 2
    assert 'raise ValueError("here")' in str(caught.traceback[-1].statement)
