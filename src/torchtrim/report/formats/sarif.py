"""Renders a report as SARIF 2.1.0 for code scanning. Only messages may quote source."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from torchtrim.records import Report
from torchtrim.report.formats import LineText
from torchtrim.report.headline import headline
from torchtrim.report.located import LocatedFinding, inside, locate_findings
from torchtrim.report.safe import clean
from torchtrim.rules.base import Rule
from torchtrim.rules.registry import all_rules

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
FINGERPRINT = "torchtrimSite/v1"
_BASE = "%SRCROOT%"


def render(report: Report, *, root: str = "", line_text: LineText = lambda path, line: "") -> str:
    """Return the findings as results of one run, with the documentation of every rule.

    Paths are relative to `root`, by default the project. `line_text` returns the text of a line. Only its
    hash is written, which identifies a finding after lines above it are added or removed.
    """
    known = all_rules()
    found = locate_findings(report, root)
    script = inside(report.script, root or report.project) or _name(report)
    index = {rule.code: at for at, rule in enumerate(known)}
    prints = _fingerprints(found, line_text)
    run = {
        "tool": {
            "driver": {
                "name": "torchtrim",
                "version": clean(report.torchtrim),
                "rules": [_rule(rule) for rule in known],
            }
        },
        "automationDetails": {"id": f"torchtrim/{quote(_name(report), safe='')}/"},
        "columnKind": "unicodeCodePoints",
        "results": [
            _result(one, index, at, _location(one, script), held=bool(report.allowed))
            for one, at in zip(found, prints, strict=True)
        ],
        "properties": {"verb": report.verb, "verdict": clean(headline(report).verdict)},
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(log), indent=2).decode() + "\n"


def _name(report: Report) -> str:
    return clean(report.script).replace("\\", "/").rpartition("/")[2]


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "help": {"text": rule.summary, "markdown": rule.page},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"tags": ["performance"]},
    }


def _result(
    found: LocatedFinding,
    index: dict[str, int],
    fingerprint: str,
    place: dict[str, Any],
    *,
    held: bool,
) -> dict[str, Any]:
    finding = found.finding
    code = clean(finding.code)
    text = f"{found.message}: {found.facts}" if found.facts else found.message
    advice = f" {found.advice[:1].upper()}{found.advice[1:]}." if found.advice else ""
    result: dict[str, Any] = {
        "ruleId": code,
        "level": "note" if found.covered else "warning",
        "message": {"text": plain(f"{text}.{advice}")},
        "locations": [place],
        "partialFingerprints": {FINGERPRINT: fingerprint},
        "occurrenceCount": max(finding.count_per_step, 1),
        "properties": _facts(found),
    }
    if code in index:
        result["ruleIndex"] = index[code]
    if held:
        why = found.reason or "on the allow-list"
        covered = {"kind": "external", "status": "accepted", "justification": why}
        result["suppressions"] = [covered] if found.covered else []
    return result


def plain(text: str) -> str:
    """Break Markdown links, which SARIF would render."""
    return text.replace("](", "] (")


def _location(found: LocatedFinding, script: str) -> dict[str, Any]:
    """Return the finding's line, or the script for a finding outside the project, which would be hidden."""
    path, line = (found.path, found.line) if found.path else (script, 1)
    place: dict[str, Any] = {"artifactLocation": {"uri": uri(path), "uriBaseId": _BASE}}
    if line:
        end = found.end_line if found.path else line
        place["region"] = {"startLine": line, "endLine": end}
    return {"physicalLocation": place}


def uri(path: str) -> str:
    """Return a relative path as a URI reference."""
    return quote(path.replace("\\", "/"), safe="/")


def _facts(found: LocatedFinding) -> dict[str, Any]:
    finding = found.finding
    facts = {
        "countPerStep": finding.count_per_step,
        "priceMs": finding.price_ms,
        "priceBytes": finding.price_bytes,
        "source": finding.source,
        "fix": finding.fix.kind if finding.fix else None,
        "allowed": found.allowed or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _fingerprints(found: Sequence[LocatedFinding], line_text: LineText) -> list[str]:
    """Hash each finding's path, code and line text, with its ordinal among equal ones."""
    prints = [""] * len(found)
    seen: Counter[tuple[str, str, str]] = Counter()
    for at in sorted(range(len(found)), key=lambda i: (found[i].where, found[i].line)):
        one = found[at]
        text = line_text(one.finding.path, one.line).strip()
        key = one.path or one.where.rpartition(":")[0], one.finding.code, text
        parts = "\0".join((*key, str(seen[key])))
        prints[at] = hashlib.sha256(parts.encode(errors="replace")).hexdigest()[:32]
        seen[key] += 1
    return prints
