"""Each verb means the same by a peak, by a percentage and by a step's time."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from torchtrim.api import (
    Request,
    Result,
    Script,
    diagnose_report,
    estimate_report,
    find_batch_report,
    optimize_report,
    plan_report,
)
from torchtrim.core.units import format_bytes
from torchtrim.errors import UsageError
from torchtrim.records import Report
from torchtrim.report import terminal

pytestmark = pytest.mark.slow  # All read what runs of every verb have said.

SOURCE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def conv(inside, out):
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 3, 16, 16), torch.randint(0, 8, (64,)))
model = nn.Sequential(conv(3, 8), conv(8, 8), nn.Flatten(), nn.Linear(8 * 256, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    for x, y in DataLoader(data, batch_size=16):
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
SHARE = "80%"
REQUEST = Request(steps=1)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    path = tmp_path_factory.mktemp("meaning") / "train.py"
    path.write_text(SOURCE)
    script = Script(path, device="emulated")
    dry = Request(steps=0, dry=True)
    return {
        "diagnose": diagnose_report(script, REQUEST),
        "plan": plan_report(script, SHARE, REQUEST, frontier=True),
        "optimize": optimize_report(script, SHARE, REQUEST),
        "estimate": estimate_report(script, dry, max_batch=SHARE),
        "find_batch": find_batch_report(script, SHARE, REQUEST),
        "reserved": estimate_report(script, dry, max_batch=SHARE, memory_kind="reserved"),
    }


def printed(report: Report, width: int = 100) -> str:
    out = StringIO()
    terminal.render(report, Console(file=out, width=width), next_command=None, amount="all")
    return out.getvalue()


def budget(report: Report) -> int | None:
    growth = report.estimated.growth if report.estimated else ()
    return growth[0].budget_bytes if growth else report.budget_bytes


def test_the_peak_is_the_same_to_the_byte_and_so_is_a_percentage_of_it(
    reports: dict[str, Result],
) -> None:
    plain = {verb: result.report for verb, result in reports.items() if verb != "reserved"}
    assert {report.memory_kind for report in plain.values()} == {"allocated"}
    (peak,) = {report.original.peak_bytes for report in plain.values() if report.original}
    assert {verb: budget(report) for verb, report in plain.items() if verb != "diagnose"} == (
        dict.fromkeys(("plan", "optimize", "estimate", "find_batch"), int(peak * 0.8))
    )
    for report in plain.values():
        first = printed(report).splitlines()
        assert any(f"peak {format_bytes(peak)}" in line for line in first[:2]), first[:2]


def test_reserved_is_on_request_and_named_beside_the_peak(reports: dict[str, Result]) -> None:
    plain, asked = reports["estimate"].report, reports["reserved"].report
    assert plain.original is not None
    reserved = plain.original.reserved_bytes
    assert reserved is not None
    assert reserved > plain.original.peak_bytes
    assert f"torch's allocator reserves {format_bytes(reserved)}" in printed(plain)
    assert budget(asked) == int(reserved * 0.8)
    assert f"reserved peak {format_bytes(reserved)}" in printed(asked).splitlines()[0]
    assert "torch's allocator reserves" not in printed(asked)


def test_other_budgets_are_in_order_once_and_name_their_device(reports: dict[str, Result]) -> None:
    report = reports["plan"].report
    budgets = [point.budget_bytes for point in report.frontier]
    assert budgets == sorted(budgets, reverse=True)
    plans = [(p.peak_bytes, frozenset(p.where)) for p in report.frontier if not p.by_hand]
    assert len(plans) == len(set(plans)) > 1
    assert {point.device for point in report.frontier} == {"a100"}
    text = printed(report)
    assert text.count("other budgets: step on A100, modelled") == 1
    assert "overwrite x" in text
    assert "step on this CPU" in text


def test_rows_of_the_peak_lead_to_the_constructor(reports: dict[str, Result]) -> None:
    report = reports["diagnose"].report
    made = SOURCE.splitlines().index(
        "    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())"
    )
    largest = report.holders[0]
    assert (largest.type, largest.made_line) == ("Conv2d", made + 1)
    assert (largest.what, largest.why) == (
        "output of convolution",
        "saved by BatchNorm for backward",
    )
    text = printed(report)
    assert f"Sequential.*.0 Conv2d, made at train.py:{made + 1}" in text
    assert "aten::native" not in text
    assert not any(part.what == "loss" for part in report.peak_parts)


def test_a_dry_run_has_no_process_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOURCE)
    with pytest.raises(UsageError, match="allocates nothing"):
        estimate_report(Script(tmp_path / "train.py"), REQUEST, memory_kind="rss")
