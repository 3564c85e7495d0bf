import re
import subprocess
import sys
from pathlib import Path

import pytest

from profiles import SCRIPT, Step
from torchtrim.errors import UsageError
from torchtrim.records.profile import Profile
from torchtrim.rules.base import HEADINGS, Rule
from torchtrim.rules.pages import main, pages
from torchtrim.rules.registry import all_rules, diagnose, explain, rule

ROOT = Path(__file__).parents[2]


def reading_step(*lines: int, project: str = "") -> Profile:
    step = Step("cuda:0")
    step.alive("parameter", 1000)
    loss = step.alive("temporary", 4)
    for line in lines:
        read = step.op("aten::_local_scalar_dense", loss, line=line, seconds=line / 1e3)
        step.sync("item", read, seconds=line / 1e3)
    return step.profile(project=project)


def test_every_rule_file_is_found_under_its_own_code() -> None:
    files = {path.stem for path in (ROOT / "src/torchtrim/rules").glob("tt*.py")}
    assert files == {found.stem for found in all_rules()}
    for found in all_rules():
        assert found.stem.startswith(found.code.lower() + "_")


def test_codes_and_names_are_distinct() -> None:
    assert len({found.code for found in all_rules()}) == len(all_rules())
    assert len({found.name for found in all_rules()}) == len(all_rules())
    assert all(re.fullmatch(r"TT\d{3}", found.code) for found in all_rules())
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)+", found.name) for found in all_rules())


@pytest.mark.parametrize("found", all_rules(), ids=lambda found: found.code)
def test_every_page_has_all_headings_in_order_and_something_under_each(found: Rule) -> None:
    assert tuple(re.findall(r"^## (.*)$", found.page, re.MULTILINE)) == HEADINGS
    parts = re.split(r"^## .*$", found.page, flags=re.MULTILINE)
    assert all(part.strip() for part in parts)
    assert found.summary.endswith(".")
    for heading, part in zip(HEADINGS, parts[1:], strict=True):
        if heading in ("Example", "Use instead"):
            code = re.search(r"```python\n(.*?)```", part, re.DOTALL)
            assert code
            compile(code[1], heading, "exec")


@pytest.mark.parametrize("found", all_rules(), ids=lambda found: found.code)
def test_every_rule_has_a_test(found: Rule) -> None:
    assert (ROOT / "tests/rules" / f"test_{found.stem}.py").is_file()


def test_the_pages_in_docs_are_current() -> None:
    folder = ROOT / "docs/rules"
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    assert written == pages(), "run: python -m torchtrim.rules.pages docs/rules"


def test_pages_are_written_into_a_new_folder(tmp_path: Path) -> None:
    main([str(tmp_path / "docs" / "rules")])
    assert {path.name for path in (tmp_path / "docs" / "rules").iterdir()} == set(pages())


def test_pages_want_one_folder() -> None:
    with pytest.raises(SystemExit, match="one folder"):
        main([])


def test_the_index_links_to_every_page() -> None:
    links = set(re.findall(r"\]\((.*?)\)", pages()["index.md"]))
    assert links == set(pages()) - {"index.md"}


def test_a_rule_by_code_or_name() -> None:
    assert rule("tt101") is rule("value-read-on-host")
    assert explain("TT101").startswith("# TT101 value-read-on-host\n\nA tensor's value is read")


@pytest.mark.parametrize(
    ("wrong", "near"), [("TT110", "TT105"), ("value-read", "value-read-on-host"), ("xyz", "TT301")]
)
def test_an_unknown_code_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(UsageError, match=near):
        rule(wrong)
    with pytest.raises(UsageError, match=near):
        explain(wrong)


def test_a_cheap_step_has_no_findings() -> None:
    step = Step()
    step.alive("parameter", 1000)
    step.op("aten::relu", makes=10)
    assert diagnose(step.profile()) == ()


def test_the_dearest_finding_comes_first() -> None:
    profile = reading_step(10, 30, 20)
    assert [f.line for f in diagnose(profile)] == [30, 20, 10]


def test_a_large_share_of_memory_comes_before_a_small_share_of_time() -> None:
    for seconds, codes in ((0.1, ["TT201", "TT101"]), (0.9, ["TT101", "TT201"])):
        step = Step("cuda:0")
        step.alive("parameter", 500)
        large = step.op("aten::addmm", makes=500, line=5, seconds=1 - seconds)
        read = step.op("aten::_local_scalar_dense", large, line=6, seconds=seconds)
        step.sync("item", read, seconds=seconds)
        assert [f.code for f in diagnose(step.profile())] == codes


def test_unpriced_findings_come_last_the_most_frequent_first() -> None:
    step = Step("emulated")
    step.alive("parameter", 1000)
    value = step.alive("temporary", 4)
    for line in (9, 8, 8):
        step.sync("item", step.op("aten::_local_scalar_dense", value, line=line))
    assert [(f.line, f.count_per_step) for f in diagnose(step.profile())] == [(8, 2), (9, 1)]


@pytest.mark.parametrize(
    ("select", "codes"),
    [
        (None, ["TT201", "TT101"]),
        (["TT1"], ["TT101"]),
        (["tt101"], ["TT101"]),
        (["TT3", "TT2"], ["TT201"]),
        (["TT301"], []),
        ([], []),
    ],
)
def test_select_by_code_and_by_beginning(select: list[str] | None, codes: list[str]) -> None:
    step = Step("cuda:0")
    large = step.op("aten::addmm", makes=1000, line=5)
    read = step.op("aten::_local_scalar_dense", large, line=6, seconds=1e-6)
    step.sync("item", read, seconds=1e-6)
    assert [f.code for f in diagnose(step.profile(), select)] == codes


@pytest.mark.parametrize("unknown", ["TT999", "", "101"])
def test_selecting_what_does_not_exist_is_an_error(unknown: str) -> None:
    with pytest.raises(UsageError, match="no rule's code"):
        diagnose(reading_step(), [unknown])


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("# torchtrim: ignore[TT101]", []),
        ("#torchtrim:ignore[tt101]", []),
        ("# type: ignore  # torchtrim: ignore[TT202, TT101] logged on purpose", []),
        ("# torchtrim: ignore[TT102]", [2]),
        ("# torchtrim: ignore[TT10]", [2]),
        ("# torchtrim: ignore", [2]),
        ("# ignore[TT101]", [2]),
    ],
)
def test_a_comment_on_the_line_leaves_its_finding_out(
    tmp_path: Path, comment: str, left: list[int]
) -> None:
    (tmp_path / SCRIPT).write_text(f"loss = net(x)\nprint(loss.item())  {comment}\n")
    profile = reading_step(2, project=str(tmp_path))
    assert [f.line for f in diagnose(profile)] == left


def test_a_comment_covers_no_other_line(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_text("a.item()  # torchtrim: ignore[TT101]\nb.item()\n")
    profile = reading_step(1, 2, project=str(tmp_path))
    assert [f.line for f in diagnose(profile)] == [2]


@pytest.mark.parametrize("path", ["missing.py", "/dev/zero", "nul\0byte.py", ".", "x" * 5000])
def test_a_source_that_cannot_be_read_ignores_nothing(tmp_path: Path, path: str) -> None:
    step = Step("cuda:0")
    step.sync(
        "item", step.op("aten::_local_scalar_dense", step.alive("buffer", 4), line=1, path=path)
    )
    assert len(diagnose(step.profile(project=str(tmp_path)))) == 1


def test_a_source_that_is_no_text_ignores_nothing(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_bytes(bytes(range(256)) * 10)
    assert len(diagnose(reading_step(1, project=str(tmp_path)))) == 1


def test_neither_room_imports_torch() -> None:
    program = (
        "import sys, torchtrim.memory, torchtrim.rules as rules; rules.all_rules();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
