from pathlib import Path

from msgspec.structs import replace

from profiles import SCRIPT, Step
from torchtrim.records.profile import Profile
from torchtrim.rules.tt603_needless_search import across


def rank(number: int, *, search: bool = True, unused: int = 0) -> Profile:
    step = Step()
    with step.module("Net", "DistributedDataParallel"):
        step.op("aten::mm")
    step.replica(400, find_unused=search, unused=unused)
    return step.profile(rank=number)


def test_a_search_that_never_finds(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_text("import torch\nmodel = DDP(net, find_unused_parameters=True)\n")
    (finding,) = across([replace(rank(number), project=str(tmp_path)) for number in (0, 1)])
    assert (finding.code, finding.path, finding.line) == ("TT603", SCRIPT, 2)
    assert "`Net` searches for unused parameters" in finding.message
    assert "on 2 ranks all of them were used" in finding.message


def test_a_search_that_finds_on_one_rank_is_needed() -> None:
    assert not [*across([rank(0), rank(1, unused=100)])]


def test_without_a_search_there_is_nothing_to_leave_out() -> None:
    assert not [*across([rank(0, search=False)])]


def test_one_rank_alone_shows_it_and_a_missing_script_has_no_line() -> None:
    (finding,) = across([rank(0)])
    assert finding.line == 0
