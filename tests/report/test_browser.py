"""The pages in a real browser: no error, no network, both themes, a phone and a screen, every section."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from report import samples
from report.browser import Tab, browser, opened
from torchtrim.api import Result, diagnose_report
from torchtrim.cli.output import write_files
from torchtrim.records.trial import Request
from torchtrim.report import html
from torchtrim.runner.script import Script
from torchtrim.workflows.stream import StreamRequest, check_report

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "charlm": ("--batch-size", "2", "--accumulate", "1"),
    "gan": ("--batch-size", "2"),
    "resnet": ("--batch-size", "2"),
    "segmentation": ("--batch-size", "1"),
    "vit": ("--batch-size", "2"),
}
NOT_TRAINED = {"endless_video"}
QUICK = {("gan", "emulated"), ("segmentation", "emulated"), ("resnet", "cpu"), ("vit", "cpu")}
PAGES = [
    pytest.param(name, device, marks=() if (name, device) in QUICK else pytest.mark.slow)
    for name in SMALL
    for device in ("emulated", "cpu")
]
"""Of `make test` most examples, each on one device; all on both are slow."""
MEASURED = ("time", "memory", "holders", "timeline-section", "operators", "machine")
PARTS = {
    "stream": ("stream", "findings", "notes", "machine"),
    "bounded stream": ("stream", "certificate", "notes", "machine"),
    "fixed": (*MEASURED, "fixes", "findings", "certificate"),
    "estimate": (*MEASURED, "estimate"),
    "plan": (*MEASURED, "plan", "frontier"),
}
WHOLE = (*MEASURED, "findings", "plan", "certificate", "notes")
FAINT = """
(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const under = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const paint = numbers(getComputedStyle(one).backgroundColor);
      if (paint.length < 4 || paint[3] > 0) return paint;
    }
    return [255, 255, 255];
  };
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), one = texts.currentNode.parentElement;
    const style = getComputedStyle(one), large = parseFloat(style.fontSize) >= 24;
    if (!text || !one.getClientRects().length) continue;
    const [low, high] = [light(numbers(style.color)), light(under(one))].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
})()
"""
"""Texts with less contrast than WCAG's AA asks for: 4.5, or 3 of 24 pixels and more."""
LOOKS = [(width, dark) for width in (360, 1440) for dark in (False, True)]

pytestmark = pytest.mark.skipif(
    browser() is None and not os.environ.get("CI"), reason="there is no Chromium"
)


def test_every_example_is_tried() -> None:
    trained = {path.stem for path in EXAMPLES.glob("*.py")} - NOT_TRAINED
    assert trained == set(SMALL)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with opened() as found:
        yield found


def page_of(folder: Path, name: str, device: str) -> Path:
    script = Script(str(EXAMPLES / f"{name}.py"), SMALL[name], device=device)
    out = folder / f"{name}-{device}"
    out.mkdir()
    return write_files(diagnose_report(script, Request(steps=1, warmup=0)), out)["page"]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sample"), "optimize")


def write(folder: Path, name: str) -> Path:
    report = samples.ALL[name]
    before = samples.profile(412) if report.original else None
    planned = samples.profile(236) if report.planned else None
    path = folder / "report.html"
    path.write_text(html.render(report, before, planned), encoding="utf-8")
    return path


def check(tab: Tab, page: Path, width: int, dark: bool, sections: tuple[str, ...]) -> None:
    seen = tab.look(page, width=width, dark=dark)
    assert seen.errors == []
    assert seen.requests == []
    found = tab.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert set(sections) <= set(found)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in paper.strip("rgb()").split(",")) / 3 > 127
    assert light is not dark
    if "timeline-section" in sections:
        assert tab.evaluate("document.querySelector('#timeline canvas').width") > 0


@pytest.mark.parametrize(("name", "device"), PAGES)
def test_the_page_of_an_example(tmp_path: Path, tab: Tab, name: str, device: str) -> None:
    page = page_of(tmp_path, name, device)
    assert page.stat().st_size < 500_000
    for width, dark in LOOKS:
        check(tab, page, width, dark, MEASURED)


def test_the_page_of_the_example_that_streams(tmp_path: Path, tab: Tab) -> None:
    pytest.importorskip("transformers")
    script = Script(str(EXAMPLES / "endless_video.py"), device="cpu")
    watched = check_report(script, StreamRequest(8, None), 1024, lambda _: None)
    page = write_files(Result(*watched), tmp_path)["page"]
    for width, dark in LOOKS:
        check(tab, page, width, dark, ("stream", "notes", "machine"))


@pytest.mark.parametrize("name", PARTS)
def test_the_sections_that_not_every_page_has(tmp_path: Path, tab: Tab, name: str) -> None:
    page = write(tmp_path, name)
    for width, dark in LOOKS:
        check(tab, page, width, dark, PARTS[name])


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_a_page_with_every_section(sample: Path, tab: Tab, width: int, dark: bool) -> None:
    check(tab, sample, width, dark, WHOLE)


@pytest.mark.parametrize("name", ["optimize", "missed", "not equal", "fixed", "plan", "estimate"])
def test_every_text_has_the_contrast_that_wcag_asks_for(
    tmp_path: Path, tab: Tab, name: str
) -> None:
    page = write(tmp_path, name)
    for width, dark in LOOKS:
        tab.look(page, width=width, dark=dark)
        assert tab.evaluate(FAINT) == []
    tab.evaluate("document.querySelector('h2').style.color = '#808080'")
    assert len(tab.evaluate(FAINT)) == 1


def test_a_hostile_page_runs_nothing(tmp_path: Path, tab: Tab) -> None:
    check(tab, write(tmp_path, "hostile"), 360, True, (*WHOLE, "fixes", "stream", "estimate"))


def test_the_page_reads_without_script(sample: Path, tab: Tab) -> None:
    seen = tab.look(sample, width=360, dark=False, script=False)
    assert seen.errors == []
    tab.send("Emulation.setScriptExecutionDisabled", value=False)
    assert tab.evaluate("document.querySelectorAll('#timeline .lane svg').length") >= 3
    assert tab.evaluate("document.querySelectorAll('#operators tbody tr').length") > 1
    assert tab.evaluate("document.querySelector('#timeline canvas')") is None


def test_the_timeline_answers_to_the_keyboard(sample: Path, tab: Tab) -> None:
    tab.look(sample, width=1440, dark=False)
    tab.evaluate("document.querySelector('#timeline canvas').focus()")
    whole = tab.evaluate("document.querySelector('#timeline .tools .n').textContent")
    tab.key("+")
    tab.key("n")
    near = tab.evaluate("document.querySelector('#timeline .tools .n').textContent")
    assert near != whole
    assert "relu" in tab.evaluate("document.querySelector('.readout').textContent")
    tab.key("ArrowRight")
    assert tab.evaluate("document.querySelector('#timeline .tools .n').textContent") != near
    tab.key("0")
    assert tab.evaluate("document.querySelector('#timeline .tools .n').textContent") == whole


def test_both_steps_share_the_time_axis(sample: Path, tab: Tab) -> None:
    tab.look(sample, width=1440, dark=False)
    steps = tab.evaluate("JSON.parse(document.getElementById('timeline-data').textContent).steps")
    assert [step["title"] for step in steps] == ["Original", "Planned"]
    assert all(step["host"] and step["memory"] for step in steps)
    tab.evaluate("document.querySelector('#timeline canvas').focus()")
    for _ in range(len(steps[0]["host"]) + 1):
        tab.key("n")
    said = tab.evaluate("document.querySelector('.readout').textContent")
    assert "relu" in said  # From the last operator of the original to those of the planned step.


def test_operators_are_sorted_and_filtered(sample: Path, tab: Tab) -> None:
    tab.look(sample, width=1440, dark=False)
    first = "document.querySelector('#operators tbody tr').cells[0].textContent"
    count = "document.querySelectorAll('#operators tbody tr:not([hidden])').length"
    tab.evaluate("document.querySelectorAll('#operators th button')[4].click()")
    most = tab.evaluate(first)
    tab.evaluate("document.querySelectorAll('#operators th button')[4].click()")
    assert tab.evaluate(first) != most
    tab.evaluate(
        "(() => { const i = document.querySelector('#operators input'); i.value = 'adam';"
        " i.dispatchEvent(new Event('input')); })()"
    )
    assert tab.evaluate(count) == 1
