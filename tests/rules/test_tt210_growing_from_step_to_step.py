"""What grows from step to step is found in scripts that have it, with its line; others are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from profiles import Step
from torchtrim import Script
from torchtrim.api import diagnose_report
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Growth, Place, Profile
from torchtrim.records.trial import Request
from torchtrim.rules.tt210_growing_from_step_to_step import check

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
losses, cache, numbers, total = [], {}, [], 0.0
for step in range(12):
    x = torch.randn(32, 16)
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GROWS = """    losses.append(loss)
    cache[step] = x.detach().clone()
    total = total + loss
"""
STAYS = """    numbers.append(loss.item())
    losses = [loss.detach()]
"""


def found(body: str, folder: Path) -> list[Finding]:
    path = folder / "train.py"
    path.write_text(HEAD + body)
    report = diagnose_report(Script(str(path), device="cpu"), Request()).report
    return [one for one in report.findings if one.code == "TT210"]


@pytest.mark.usefixtures("processes_are_not_traced")
@pytest.mark.slow
def test_each_kind_is_found_with_its_line_and_price(tmp_path: Path) -> None:
    findings = {one.message.partition(" grows")[0]: one for one in found(GROWS, tmp_path)}
    assert findings.keys() == {
        *("list losses", "dict cache", "the graph of total"),
    }
    first = HEAD.count("\n") + 1
    for name, line in (("list losses", first), ("dict cache", first + 1)):
        assert (Path(findings[name].path).name, findings[name].line) == ("train.py", line)
    assert "hold their graphs" in findings["list losses"].message
    assert "hold their graphs" not in findings["dict cache"].message
    assert 32 * 16 * 4 <= (findings["dict cache"].price_bytes or 0) <= 2 * 32 * 16 * 4
    assert all((one.price_bytes or 0) > 0 for one in findings.values())


@pytest.mark.slow
@pytest.mark.usefixtures("processes_are_not_traced")
def test_it_is_silent_where_only_numbers_are_kept(tmp_path: Path) -> None:
    assert found(STAYS, tmp_path) == []


def profile(**given: object) -> Profile:
    facts = {"name": "cache", "kind": "dict", "bytes": 4096, "entries": 2.0}
    facts |= {"adapter": "", "place": 1, "caller": 0}
    growth = Growth(**{**facts, **given})  # type: ignore[arg-type]
    step = Step()
    step.op("aten::add.Tensor", makes=1000)
    places = [Place("/home/me/train.py", 12, "main"), Place("/lib/cache.py", 7, "put")]
    return replace(step.profile(), places=places, growths=[growth])


def test_a_finding_has_the_users_line_and_the_librarys() -> None:
    (finding,) = check(profile())
    assert (finding.path, finding.line) == ("/home/me/train.py", 12)
    assert finding.message == (
        "dict cache grows by 2 entries and 4.00 KiB a step, filled at cache.py:7 in put"
    )
    assert finding.fix is not None
    assert "maxlen" in finding.fix.reason


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"bytes": 100}, 0),
        ({"bytes": 100, "kind": "list of graphs"}, 1),
        ({"bytes": 100, "kind": "graph", "place": -1, "caller": -1}, 1),
        ({"kind": "lru_cache"}, 1),
    ],
)
def test_little_is_reported_only_where_it_holds_graphs(
    given: dict[str, object], count: int
) -> None:
    findings = list(check(profile(**given)))
    assert len(findings) == count
    assert all(one.fix is not None and one.fix.reason for one in findings)


def test_what_grows_in_a_stream_is_another_rules() -> None:
    assert list(check(replace(profile(), operators=[]))) == []
