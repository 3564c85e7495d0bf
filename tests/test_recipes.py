"""The recipes of CONTRIBUTING: a rule, a fix and a renderer are one file each.

tests/techniques/test_one_file.py does the same with a technique.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from profiles import training_step
from torchtrim import fixes, rules
from torchtrim.cli.main import torchtrim
from torchtrim.cli.verbs import lint
from torchtrim.report import formats
from torchtrim.rewriter.pages import page as fixes_page
from torchtrim.rules.registry import all_rules, diagnose

RULE = '''"""A step has more operators than a person can count.

## What it does

Counts operators.
"""

from collections.abc import Iterator

from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    count = len(profile.operators)
    yield Finding(
        code=RULE.code,
        path="train.py",
        line=1,
        end_line=1,
        message=f"{count} operators in a step",
        count_per_step=1,
    )


RULE = Rule(code="TT299", name="many-operators", check=check)
'''
FIX = '''"""`torch.sum(X).item()` becomes `float(X.sum())`."""

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts


def write(match: Match, facts: Facts) -> Writing:
    return Writing(replace(match, "float(X.sum())"))


FIX: Fix = Fix(
    codes=("TT101",),
    equivalence="BITWISE",
    find=of_forms(lambda: FIX, "torch.sum(X).item()"),
    write=write,
)
'''
RENDERER = '''"""Renders a report as one line."""

from torchtrim.records.report import Report


def render(report: Report, *, root: str = "", **_: object) -> str:
    return f"{report.verb}: {len(report.findings)} findings\\n"
'''
Drop = Callable[[ModuleType, str, str], None]


@pytest.fixture
def drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drop]:
    """Write a file into a folder that a package's registry searches."""
    dropped: list[str] = []

    def drop(package: ModuleType, name: str, text: str) -> None:
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / f"{name}.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        dropped.append(f"{package.__name__}.{name}")

    yield drop
    for name in dropped:
        sys.modules.pop(name, None)


def test_a_rule_is_one_file(drop: Drop) -> None:
    drop(rules, "tt299_many_operators", RULE)
    profile = training_step()
    (finding,) = diagnose(profile, ["TT299"])
    assert finding.message == f"{len(profile.operators)} operators in a step"
    assert "TT299" in {rule.code for rule in all_rules()}
    shown = CliRunner().invoke(torchtrim, ["explain", "many-operators"])
    assert shown.exit_code == 0
    assert "Counts operators." in shown.output


def test_a_fix_is_one_file(drop: Drop, tmp_path: Path) -> None:
    drop(fixes, "sum_read", FIX)
    script = tmp_path / "loss.py"
    script.write_text(
        "import torch\n\n\ndef total(x: torch.Tensor) -> float:\n    return torch.sum(x).item()\n"
    )
    shown = CliRunner().invoke(torchtrim, ["lint", str(script), "--diff"])
    assert "+    return float(x.sum())" in shown.output
    assert "sum_read" in fixes_page()


def test_a_renderer_is_one_file(drop: Drop, tmp_path: Path) -> None:
    drop(formats, "line", RENDERER)
    script = tmp_path / "loss.py"
    script.write_text(
        "import torch\n\n\ndef total(x: torch.Tensor) -> float:\n    return x.item()\n"
    )
    verb = importlib.reload(lint).command  # A new process: the choices are found at import.
    shown = CliRunner().invoke(verb, [str(script), "--format", "line"])
    assert shown.stdout == "lint: 1 findings\n"
    importlib.reload(lint)
