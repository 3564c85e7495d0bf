"""SARIF 2.1.0: the constraints of the published schema on what is written, taken down by hand."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report import samples
from torchtrim.records import Report
from torchtrim.records.allow import AllowedFinding
from torchtrim.report.formats import sarif
from torchtrim.rules.registry import all_rules

LEVELS = ("none", "note", "warning", "error")
MULTIFORMAT = {"text!": str, "markdown": str}
BAG = {"...": object}
SCHEMA: dict[str, Any] = {
    "$schema": str,
    "version!": ("2.1.0",),
    "runs!": [
        {
            "tool!": {
                "driver!": {
                    "name!": str,
                    "version": str,
                    "rules": [
                        {
                            "id!": str,
                            "name": str,
                            "shortDescription": MULTIFORMAT,
                            "help": MULTIFORMAT,
                            "defaultConfiguration": {"level": LEVELS},
                            "properties": BAG,
                        }
                    ],
                }
            },
            "automationDetails": {"id": str},
            "columnKind": ("utf16CodeUnits", "unicodeCodePoints"),
            "properties": BAG,
            "results": [
                {
                    "ruleId": str,
                    "ruleIndex": int,
                    "level": LEVELS,
                    "message!": {"text!": str},
                    "locations": [
                        {
                            "physicalLocation": {
                                "artifactLocation": {"uri": str, "uriBaseId": str},
                                "region": {"startLine": 1, "endLine": 1},
                            }
                        }
                    ],
                    "partialFingerprints": {"...": str},
                    "occurrenceCount": 1,
                    "suppressions": [
                        {
                            "kind!": ("inSource", "external"),
                            "status": ("accepted", "underReview", "rejected"),
                            "justification": str,
                        }
                    ],
                    "properties": BAG,
                }
            ],
        }
    ],
}
"""A type; a tuple of values; a least integer; `!` marks what is required, `...` any other name."""


def check(value: Any, schema: Any, where: str = "log") -> None:
    if isinstance(schema, dict):
        names = {name.rstrip("!"): inner for name, inner in schema.items()}
        assert isinstance(value, dict), where
        assert {name[:-1] for name in schema if name.endswith("!")} <= set(value), where
        for name, item in value.items():
            assert name in names or "..." in names, f"{where}.{name}"
            check(item, names.get(name, names.get("...")), f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for at, item in enumerate(value):
            check(item, schema[0], f"{where}[{at}]")
    elif isinstance(schema, tuple):
        assert value in schema, where
    elif isinstance(schema, int):
        assert isinstance(value, int), where
        assert value >= schema, where
    else:
        assert isinstance(value, schema), where


def run_of(report: Report, **more: Any) -> dict[str, Any]:
    log = json.loads(sarif.render(report, **more))
    check(log, SCHEMA)
    run: dict[str, Any] = log["runs"][0]
    return run


def place_of(result: dict[str, Any]) -> tuple[str, int]:
    physical = result["locations"][0]["physicalLocation"]
    return physical["artifactLocation"]["uri"], physical.get("region", {}).get("startLine", 0)


@pytest.mark.parametrize("name", samples.ALL)
def test_it_is_what_the_schema_says(name: str) -> None:
    for result in run_of(samples.ALL[name])["results"]:
        physical = result["locations"][0]["physicalLocation"]
        uri = physical["artifactLocation"]["uri"]
        assert re.fullmatch(r"[\w.~%/-]+", uri, re.ASCII)
        assert not uri.startswith("/")
        region = physical.get("region")
        assert region is None or region["endLine"] >= region["startLine"] >= 1
        assert json.dumps(result).isascii()


def test_a_result_has_its_rule_place_and_price() -> None:
    run = run_of(samples.DIAGNOSE)
    first, *_, last = run["results"]
    assert place_of(first) == ("models/encoder.py", 43)
    assert first["occurrenceCount"] == 12
    assert first["properties"]["priceBytes"] == 74 * samples.MIB
    assert first["message"]["text"].endswith("12 a step, 74.0 MiB. Relu can work in place.")
    rule = run["tool"]["driver"]["rules"][last["ruleIndex"]]
    assert rule["id"] == last["ruleId"] == "TT301"


def test_every_rule_is_documented_and_unknown_codes_have_no_index() -> None:
    run = run_of(samples.DIAGNOSE)
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.code for rule in all_rules()]
    assert all("## Why is this bad?" in rule["help"]["markdown"] for rule in rules)
    unknown = next(r for r in run["results"] if r["ruleId"] == "TT299")
    assert "ruleIndex" not in unknown


def test_paths_are_relative_to_the_root_that_is_given() -> None:
    run = run_of(samples.DIAGNOSE, root="/home/ana")
    assert place_of(run["results"][0])[0] == "segmenter/models/encoder.py"
    assert "/home/ana" not in json.dumps(run)


def test_what_lies_outside_is_shown_at_the_script_and_named() -> None:
    path = "/usr/lib/python3/site-packages/torch/optim/adam.py"
    found = msgspec.structs.replace(samples.FINDINGS[3], path=path)
    run = run_of(msgspec.structs.replace(samples.DIAGNOSE, findings=(found,)))
    (result,) = run["results"]
    assert place_of(result) == ("train.py", 1)
    assert "(in torch/optim/adam.py:97)" in result["message"]["text"]


def test_no_source_is_in_it_but_messages() -> None:
    report = msgspec.structs.replace(samples.DIAGNOSE, project="/home/ana/segmenter")
    text = sarif.render(report, line_text=lambda path, line: "password = 'secret'")
    assert "secret" not in text
    assert "F.relu(self.norm(x))" not in text
    assert "/home/ana" not in text


def test_what_is_allowed_is_suppressed_with_its_reason() -> None:
    waits = samples.FINDINGS[3]
    allowed = AllowedFinding(
        code="TT101", path="train.py", line=97, line_text="x", count=4, used=4, reason="logging"
    )
    report = msgspec.structs.replace(
        samples.DIAGNOSE, project="/home/ana/segmenter", findings=(waits, samples.FINDINGS[0])
    )
    first, second = run_of(msgspec.structs.replace(report, allowed=(allowed,)))["results"]
    assert first["level"] == "note"
    assert [s["justification"] for s in first["suppressions"]] == ["logging"]
    assert (second["level"], second["suppressions"]) == ("warning", [])
    assert all("suppressions" not in result for result in run_of(report)["results"])
    part = msgspec.structs.replace(allowed, used=2)
    first, _ = run_of(msgspec.structs.replace(report, allowed=(part,)))["results"]
    assert (first["level"], first["suppressions"]) == ("warning", [])


def prints(lines: list[str], at: list[int]) -> list[str]:
    found = tuple(samples.finding("TT101", line, "waits", path="/p/a.py") for line in at)
    report = msgspec.structs.replace(samples.DIAGNOSE, project="/p", findings=found)
    run = run_of(report, line_text=lambda path, line: lines[line - 1])
    return [result["partialFingerprints"][sarif.FINGERPRINT] for result in run["results"]]


def test_a_fingerprint_survives_lines_that_come_above() -> None:
    code = ["x.item()", "y.item()", "x.item()"]
    before = prints(code, [1, 2, 3])
    assert len(set(before)) == 3
    assert prints(["import math", "", *code], [3, 4, 5]) == before
    assert prints(["  " + line for line in code], [1, 2, 3]) == before
    assert prints(code, [3, 1, 2]) == [before[2], before[0], before[1]]
    assert prints(["z.item()", *code[1:]], [1, 2, 3])[0] not in before


def test_two_scripts_are_two_analyses() -> None:
    other = msgspec.structs.replace(samples.DIAGNOSE, script="/home/ana/segmenter/evaluate.py")
    ids = {run_of(report)["automationDetails"]["id"] for report in (samples.DIAGNOSE, other)}
    assert ids == {"torchtrim/train.py/", "torchtrim/evaluate.py/"}


@given(st.text())
def test_any_path_is_a_uri_and_comes_back(path: str) -> None:
    given_path = path.encode(errors="ignore").decode()
    written = sarif.uri(given_path)
    assert re.fullmatch(r"[\w.~%/-]*", written, re.ASCII)
    assert unquote(written) == given_path.replace("\\", "/")


@given(st.text())
def test_no_text_is_taken_for_a_link(text: str) -> None:
    assert not re.search(r"\]\(", sarif.plain(text))
