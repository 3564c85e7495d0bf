import base64
import hashlib
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from report import samples
from torchtrim.records import Report, Suggestion
from torchtrim.records.profile import Storage
from torchtrim.report import html
from torchtrim.report.breakdown import splits
from torchtrim.report.charts import picture, ticks
from torchtrim.report.page_title import page_title

BEFORE, AFTER = samples.profile(412), samples.profile(236)
VOID = {"meta", "br", "hr", "img", "input", "link", "path"}


class Page(HTMLParser):
    """Checks that every element is closed, and keeps the words, tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def rendered(report: Report, **options: bool) -> str:
    before = BEFORE if report.original else None
    return html.render(report, before, AFTER if report.planned else None, **options)


@pytest.mark.parametrize("name", samples.ALL)
def test_the_page_is_well_formed_and_loads_nothing(name: str) -> None:
    source = rendered(samples.ALL[name])
    page = Page(source)
    assert not {"link", "img", "iframe", "object", "form"} & set(page.tags)
    assert page.tags.count("script") <= 2
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    loads = [v for k, v in page.attributes if k in ("src", "href", "srcset", "action")]
    assert all(value.startswith("data:application/json") for value in loads)
    assert not re.search(r"https?://|@import|url\(|fetch|XMLHttp|import\(", source)
    assert len(source.encode()) < 500_000


def test_headings_go_down_one_level_at_a_time() -> None:
    levels = [int(t[1]) for t in Page(rendered(samples.OPTIMIZE)).tags if re.fullmatch("h[1-6]", t)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_optimize_says_the_key_facts() -> None:
    text = Page(rendered(samples.OPTIMIZE)).text
    for fact in (
        "BITWISE",
        "412 MiB",
        "236 MiB",
        "240 MiB",
        "-43 %",
        "247 MiB",
        "+11 %, one run each",
    ):
        assert fact in text
    for finding in samples.FINDINGS:
        assert finding.code in text
        assert finding.message.replace("`", "") in text
    for section in ("Memory", "Time", "Is it safe", "The plan", "Findings", "The certificate"):
        assert section in text
    assert "model.encoder.layers.0-3" in text
    assert "torch 2.13.0" in text


def test_the_other_verbs_and_verdicts() -> None:
    texts = {name: Page(rendered(report)).text for name, report in samples.ALL.items()}
    assert "Nothing: the program ran as it is." in texts["diagnose"]
    assert "Planned, and not tried yet:" in texts["plan"]
    assert "Not known yet: the plan is a prediction." in texts["plan"]
    assert "Other budgets" in texts["plan"]
    assert "Every compared bit is equal." in texts["verify"]
    assert "gradient of model.encoder.layers.3 at models/encoder.py:43" in texts["not equal"]
    assert "do not use it" in texts["not equal"]
    assert "and the peak is over the budget" in texts["undecided"]
    assert "4.00 MiB over the budget of 247 MiB" in texts["undecided"]


def test_hostile_names_are_inert() -> None:
    source = rendered(samples.HOSTILE_REPORT)
    assert "&lt;script&gt;" in source
    assert source.count("<script") == source.count("</script") == 2
    for poison in ("<script>alert", "\x1b", "\u202e", "\u200f"):
        assert poison not in source


def test_the_charts_share_a_scale_and_mark_peak_and_budget() -> None:
    source = rendered(samples.OPTIMIZE)
    assert source.count('<svg viewBox="0 0 1000 1000"') == 2
    assert len(re.findall(r'class="budget \w+"', source)) == 2
    assert "tracked peak 403 MiB" in source
    assert "9.00 MiB more" in source
    tops = re.findall(r'class="tick" style="bottom:([\d.]+)%"', source)
    assert tops[: len(tops) // 2] == tops[len(tops) // 2 :]


def test_a_budget_far_above_the_peak_does_not_flatten_the_chart() -> None:
    report = msgspec.structs.replace(samples.OPTIMIZE, budget_bytes=8 * 2**30)
    source = rendered(report)
    assert 'class="budget' not in source
    assert "The budget of 8.00 GiB is above the chart." in source


def test_a_profile_without_operators_is_no_chart() -> None:
    empty = msgspec.structs.replace(
        BEFORE,
        operators=[],
        storages=[Storage(1, "parameter", -1, 0, "cpu", "w")],
    )
    assert picture(empty, "Original") is None
    assert "<svg" not in html.render(samples.DIAGNOSE, empty, None)


@pytest.mark.parametrize("top", [1, 900, 5000, 412 * 2**20, 95 * 2**30, 3000 * 2**30])
def test_ticks_are_few_and_round(top: int) -> None:
    found = ticks(top)
    assert found[0] == 0
    assert 1 <= len(found) <= 7
    assert found[-1] <= top


def project(tmp_path: Path) -> Report:
    (tmp_path / "models").mkdir()
    (tmp_path / "train.py").write_text("".join(f"line_{i} = {i}\n" for i in range(1, 121)))
    (tmp_path / "secret.txt").write_text("the password\n" * 100)
    encoder = "".join(f"layer_{i} = '<b>'\n" for i in range(1, 61))
    (tmp_path / "models" / "encoder.py").write_text(encoder)
    text = msgspec.json.encode(samples.OPTIMIZE).decode()
    return msgspec.json.decode(text.replace("/home/ana/segmenter", str(tmp_path)), type=Report)


def test_two_lines_around_each_finding_are_quoted(tmp_path: Path) -> None:
    source = rendered(project(tmp_path))
    assert all(f"layer_{i} = &#39;&lt;b&gt;&#39;" in source for i in range(41, 46))
    assert "layer_40 " not in source
    assert "layer_46 " not in source
    assert '<span class="hot"><i>43</i>' in source


def test_only_python_files_are_read(tmp_path: Path) -> None:
    report = project(tmp_path)
    odd = [tmp_path / "secret.txt", tmp_path, tmp_path / "no.py", Path("\0.py")]
    findings = [samples.finding("TT201", 5, "odd", path=str(path)) for path in odd]
    page = rendered(msgspec.structs.replace(report, findings=tuple(findings)))
    assert "password" not in page
    assert '<pre class="source"' not in page


def test_a_long_region_is_cut(tmp_path: Path) -> None:
    report = project(tmp_path)
    finding = samples.finding("TT201", 10, "x", path=str(tmp_path / "train.py"), end_line=110)
    page = rendered(msgspec.structs.replace(report, findings=(finding,)))
    assert page.partition('<pre class="source"')[2].partition("</pre>")[0].count("<i>") == 12


def test_without_source_no_path_and_no_line_of_it_is_left(tmp_path: Path) -> None:
    report = project(tmp_path)
    report = msgspec.structs.replace(
        report,
        certificate=msgspec.structs.replace(
            samples.NOT_EQUAL.certificate, reason=f"see {tmp_path}/train.py:12"
        ),
        project=str(tmp_path),
        notes=("wrote /var/tmp/other/file.bin and C:\\Users\\ana\\x.bin", "train.py has no seed"),
    )
    page = rendered(report, source=False)
    embedded = re.search(r"base64,([\w+/=]+)", page)
    assert embedded
    for text in (page, base64.b64decode(embedded[1]).decode()):
        for leak in (str(tmp_path), "train.py", "encoder.py", "layer_43", "inplace", "/var/tmp"):
            assert leak not in text
        assert "Users" not in text
        assert "TT201" in text
        assert "model.encoder.layers" in text


def test_the_report_can_be_saved_from_the_page() -> None:
    embedded = re.search(r"base64,([\w+/=]+)", rendered(samples.OPTIMIZE))
    assert embedded
    saved = msgspec.json.decode(base64.b64decode(embedded[1]), type=Report)
    assert saved == samples.OPTIMIZE


@pytest.mark.slow
def test_a_huge_report_is_capped_and_says_so() -> None:
    worst = "&'\"<😀" * 2000
    fix = Suggestion(kind="code", diff="\n".join([worst] * 80), reason=worst)
    finding = msgspec.structs.replace(samples.FINDINGS[0], message=worst, fix=fix)
    holder = msgspec.structs.replace(samples.HOLDERS[0], module=worst, why=worst)
    report = msgspec.structs.replace(
        samples.OPTIMIZE,
        findings=(finding,) * 3000,
        holders=(holder,) * 3000,
        notes=(worst,) * 3000,
    )
    long = samples.profile(412, layers=3000, name="deep." * 500)
    page = html.render(report, long, long)
    assert len(page.encode()) < 500_000
    assert re.search(r"\+29\d\d more findings, left out of this page", page)
    assert re.search(r"\+29\d\d more groups of tensors", page)


def test_only_the_script_that_the_policy_names_may_run() -> None:
    source = rendered(samples.OPTIMIZE)
    policy = re.search(r'Security-Policy" content="([^"]+)"', source)
    assert policy
    script = source.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")


def test_the_parts_of_the_step_add_up() -> None:
    text = Page(rendered(samples.DIAGNOSE)).text
    for section in ("Where the step's time goes", "Timeline of the step", "Operators"):
        assert section in text
    assert "The machine" in text
    found = splits(samples.DIAGNOSE, BEFORE)
    assert [one.source for one in found] == ["measured"]
    assert sum(part.share for part in found[0].parts) == pytest.approx(100)


def test_hostile_names_in_a_profile_are_inert_in_the_timeline() -> None:
    hostile = samples.profile(412, name=samples.HOSTILE)
    source = html.render(samples.DIAGNOSE, hostile, None)
    data = re.search(r'id="timeline-data">(.*?)</script>', source)
    assert data
    assert "<" not in data[1]
    assert "\x1b" not in source
    assert any("alert" in word for word in msgspec.json.decode(data[1])["words"])


def test_ten_thousand_operators_fit_and_what_was_dropped_is_said() -> None:
    source = html.render(samples.DIAGNOSE, samples.profile(412, layers=5000), None)
    assert len(source.encode()) < 500_000
    assert re.search(r"the timeline shows the \d+ longest of 10001 operators", source)


def test_the_next_command_is_at_the_top() -> None:
    command = "torchtrim run train.py --plan torchtrim-out/train/plan.toml"
    page = rendered(msgspec.structs.replace(samples.OPTIMIZE, next=command))
    header = page.partition("<main>")[0]
    assert f"<code>{command}</code>" in header
    assert 'class="next"' not in rendered(samples.OPTIMIZE)


def test_the_title_is_short() -> None:
    assert "<title>torchtrim: Fits: 412 \u2192 236 MiB, bit-identical</title>" in rendered(
        samples.OPTIMIZE
    )
    assert page_title(samples.MISSED).first == "Does not fit 100 MiB: the least is 236 MiB"


def test_fixes_that_nobody_wrote_are_called_so() -> None:
    beside = msgspec.structs.replace(
        samples.OPTIMIZE, fixes=msgspec.structs.replace(samples.FIXED.fixes, written=False)
    )
    page = rendered(beside)
    assert "suggested, not written" in page_title(beside).others[-1]
    assert "Fixes, not written" in page
    places = tuple(
        msgspec.structs.replace(one, equivalence="ROUNDING") for one in beside.fixes.places
    )
    fixes = msgspec.structs.replace(beside.fixes, places=places, certificate=samples.BITWISE)
    rounding = rendered(msgspec.structs.replace(beside, fixes=fixes))
    assert "Compared on their own: ROUNDING." in rounding
    assert page.index('id="memory"') < page.index('id="fixes"')


def test_charts_are_as_wide_as_time_without_the_loader() -> None:
    profile = samples.profile(412)
    times = [0.0] * len(profile.operators)
    times[0], times[-1] = 1.0, 3.0
    drawn = picture(profile, "Original", times)
    assert drawn is not None
    assert drawn.peak_bytes == picture(profile, "Original").peak_bytes
    assert drawn.phases.count(profile.operators[-1].phase) > len(drawn.phases) / 2


def test_a_missed_budget_says_first_what_meets_it() -> None:
    *others, last = samples.MISSED.levers
    levers = (*others, msgspec.structs.replace(last, peak_bytes=90 * samples.MIB))
    missed = msgspec.structs.replace(samples.MISSED, levers=levers)
    text = Page(html.render(missed, None, None)).text
    assert "Itfitswith--allowrounding:relative_attention,90.0MiB" in "".join(text.split())
    assert "It fits with" not in Page(html.render(samples.MISSED, None, None)).text
