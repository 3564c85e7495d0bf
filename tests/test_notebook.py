"""The notebook forms, with a stand-in for IPython."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiles import training_step
from report import samples
from report.test_html import Page
from torchtrim import notebook
from torchtrim.records.plan import Plan
from torchtrim.report import cell

PLAN = Plan(
    torchtrim="0",
    script="train.py",
    fingerprint={},
    budget_bytes=8 * 2**30,
    techniques=samples.PLAN.techniques,
    predicted=samples.PLAN.predicted,
)
RECORDS: dict[str, Any] = {
    **samples.ALL,
    "a profile": samples.profile(412),
    "a step": training_step(),
    "a finding": samples.FINDINGS[0],
    "a hostile finding": samples.HOSTILE_REPORT.findings[0],
    "a plan": PLAN,
    "a certificate": samples.BITWISE,
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_script_free_html_and_text(name: str) -> None:
    source = cell.html(RECORDS[name])
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object", "form", "style"} & set(page.tags)
    assert not [key for key, _ in page.attributes if key.startswith("on") or key in ("src", "href")]
    text = cell.text(RECORDS[name])
    for poison in ("\x1b", "\u202e", "\u200f"):
        assert poison not in source + text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert len(source) < 100_000


def test_both_say_the_same() -> None:
    for shown in (cell.html(samples.OPTIMIZE), cell.text(samples.OPTIMIZE)):
        for fact in ("BITWISE", "412 MiB", "236 MiB", "TT201", "recompute"):
            assert fact in shown
    for shown in (cell.html(PLAN), cell.text(PLAN)):
        assert "8.00 GiB" in shown
        assert "model.encoder.layers.0-3" in shown
    assert "<svg" in cell.html(samples.profile(412))


class Formatter(dict[str, Any]):
    def for_type_by_name(self, module: str, name: str, function: Any) -> None:
        self[f"{module}.{name}"] = function


class Shell:
    """What the extension needs of IPython."""

    def __init__(self) -> None:
        self.formatters = {"text/html": Formatter(), "text/plain": Formatter()}
        self.display_formatter = SimpleNamespace(formatters=self.formatters, format=self._format)
        self.display_pub = SimpleNamespace(publish=lambda data, _: self.shown.append(data))
        self.shown: list[Any] = []
        self.magics: dict[str, Any] = {}
        self.names: dict[str, Any] = {"torch": torch}

    def register_magic_function(self, function: Any, kind: str, name: str) -> None:
        self.magics[kind, name] = function

    def run_cell(self, source: str, store_history: bool) -> Any:
        try:
            exec(source, self.names)
        except ArithmeticError:
            return SimpleNamespace(success=False)
        return SimpleNamespace(success=True)

    def _format(self, record: Any) -> tuple[dict[str, str], dict[str, str]]:
        kind = f"{type(record).__module__}.{type(record).__name__}"
        return {"text/html": self.formatters["text/html"][kind](record)}, {}


@pytest.fixture
def shell() -> Shell:
    found = Shell()
    notebook.load_ipython_extension(found)
    return found


def test_every_record_has_both_forms(shell: Shell) -> None:
    for form in ("text/html", "text/plain"):
        assert len(shell.formatters[form]) == 5
    said: list[str] = []
    printer = SimpleNamespace(text=said.append)
    shell.formatters["text/plain"]["torchtrim.records.plan.Plan"](PLAN, printer, False)
    assert said[0].startswith("plan for 8.00 GiB")


def test_the_magic_measures_a_cell(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    magic = shell.magics["cell", "torchtrim"]
    code = "y = (torch.ones(4, device='cuda') * 2).sum().item()"
    found = magic("--device emulated --keep", code)
    assert shell.names["y"] == 8.0
    assert len(found.waits) == 1
    assert "1 host-device sync" in capsys.readouterr().out
    assert "the cell" in shell.shown[0]["text/html"]


def test_a_cell_that_fails_and_an_option_that_is_none(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    magic = shell.magics["cell", "torchtrim"]
    assert magic("--device cpu", "1 / 0") is None
    assert shell.shown == []
    assert magic("--oops", "1") is None
    assert "%%torchtrim --device emulated" in capsys.readouterr().out


def test_records_show_themselves_as_soon_as_it_is_imported_and_without_torch() -> None:
    code = """
import sys, types
calls = []
form = types.SimpleNamespace(for_type_by_name=lambda *names: calls.append(names))
shell = types.SimpleNamespace(display_formatter=types.SimpleNamespace(
    formatters={"text/html": form, "text/plain": form}))
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
import torchtrim
assert len(calls) == 10, calls
assert not {"torch", "rich", "torchtrim.report"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
