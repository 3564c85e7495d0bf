from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report import samples
from torchtrim.records import Report
from torchtrim.records.allow import AllowedFinding
from torchtrim.report.formats import github
from torchtrim.report.safe import clean

COMMAND = re.compile(r"::(error|warning|notice)(?: ([^:]*))?::(.*)")


def read(text: str) -> list[tuple[str, dict[str, str], str]]:
    """The commands of a log, as a runner reads them."""
    return [read_one(line) for line in text.split("\n")[:-1]]


def read_one(line: str) -> tuple[str, dict[str, str], str]:
    match = COMMAND.fullmatch(line)
    assert match is not None, line
    pairs = (pair.split("=", 1) for pair in (match[2] or "").split(",") if pair)
    return match[1], {key: unescape(value) for key, value in pairs}, unescape(match[3])


def unescape(text: str) -> str:
    for code, character in (("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


@pytest.mark.parametrize("name", samples.ALL)
def test_each_line_is_a_command(name: str) -> None:
    report = samples.ALL[name]
    commands = read(github.render(report))
    assert len(commands) - len(report.findings) in (0, 1)
    assert all(properties.get("title") for _, properties, _ in commands)


def test_a_finding_is_a_warning_at_its_line() -> None:
    level, properties, message = read(github.render(samples.DIAGNOSE))[0]
    assert level == "warning"
    assert properties == {
        "file": "models/encoder.py",
        "line": "43",
        "endLine": "43",
        "title": "TT201 peak-owned-by-one-tensor",
    }
    assert message.split("\n") == [
        samples.FINDINGS[0].message,
        "12 a step, 74.0 MiB",
        "relu can work in place",
    ]


@pytest.mark.parametrize(
    ("report", "level"), [(samples.NOT_EQUAL, "error"), (samples.UNDECIDED, "error")]
)
def test_a_bad_verdict_comes_first(report: Report, level: str) -> None:
    first = read(github.render(report))[0]
    assert first[0] == level
    assert first[1]["title"].startswith("torchtrim: ")


def test_a_verdict_that_is_unsure_is_a_warning() -> None:
    unsure = msgspec.structs.replace(samples.UNDECIDED, budget_bytes=None)
    assert read(github.render(unsure))[0][0] == "warning"


def test_the_first_difference_is_pointed_at() -> None:
    report = msgspec.structs.replace(samples.NOT_EQUAL, project="/home/ana/segmenter")
    _, properties, message = read(github.render(report))[0]
    assert (properties["file"], properties["line"]) == ("models/encoder.py", "43")
    assert "first difference" in message


def test_a_good_verdict_needs_no_line() -> None:
    assert github.render(samples.VERIFY) == ""


def test_what_is_allowed_is_a_notice() -> None:
    allowed = AllowedFinding(code="TT101", path="train.py", line=97, line_text="x", count=4, used=4)
    report = msgspec.structs.replace(
        samples.DIAGNOSE,
        project="/home/ana/segmenter",
        findings=samples.FINDINGS[3:4],
        allowed=(allowed,),
    )
    ((level, _, message),) = read(github.render(report))
    assert level == "notice"
    assert "4 a step, 3.20 ms modelled, 4 allowed" in message


def test_what_lies_outside_has_no_file() -> None:
    found = msgspec.structs.replace(samples.FINDINGS[3], path="/opt/other/loop.py")
    report = msgspec.structs.replace(samples.DIAGNOSE, findings=(found,))
    ((_, properties, message),) = read(github.render(report))
    assert "file" not in properties
    assert "(in loop.py:97)" in message


def test_hostile_names_make_no_command_of_their_own() -> None:
    found = samples.finding(
        "TT101", 3, "x\n::error::gone\r\n::set-env name=A::b", path="/p/a,b:c.py"
    )
    report = msgspec.structs.replace(samples.DIAGNOSE, project="/p", findings=(found,))
    text = github.render(report)
    assert text.count("\n") == 1
    ((_, properties, message),) = read(text)
    assert properties["file"] == "a,b:c.py"
    assert "::set-env" in message


@given(st.text())
def test_a_message_comes_back_on_one_line(text: str) -> None:
    escaped = github.escape_message(text)
    assert "\n" not in escaped
    assert "\r" not in escaped
    assert unescape(escaped) == "\n".join(map(clean, text.split("\n")))


@given(st.text(), st.text())
def test_a_property_comes_back_and_ends_nowhere_else(value: str, message: str) -> None:
    line = github.command("warning", message, file=value, title="t")
    assert read_one(line) == (
        "warning",
        {"file": clean(value), "title": "t"},
        "\n".join(map(clean, message.split("\n"))),
    )
