import msgspec

from report import samples
from torchtrim.records.allow import AllowedFinding, PassedLimit
from torchtrim.report import gate

REPORT = msgspec.structs.replace(samples.DIAGNOSE, project="/home/ana/segmenter")
NAME = "torchtrim-allow.toml"


def allowed(used: int, **more: object) -> AllowedFinding:
    base = AllowedFinding(code="TT101", path="train.py", line=9 * used, count=4, used=used)
    return msgspec.structs.replace(base, **more)


def test_nothing_to_say() -> None:
    assert gate.render(REPORT, (), NAME) == ""


def test_a_limit_names_what_is_over() -> None:
    over = PassedLimit(limit="4 waits a step, --max-syncs 0", findings=samples.FINDINGS[3:4])
    assert gate.render(REPORT, (over, PassedLimit(limit="peak 3 B, --max-peak 2 B")), NAME) == (
        "OVER THE LIMIT  4 waits a step, --max-syncs 0\n"
        "  TT101  train.py:97  4 a step, 3.20 ms modelled\n"
        "OVER THE LIMIT  peak 3 B, --max-peak 2 B\n"
    )


def test_what_is_allowed_is_a_line_and_what_is_no_longer_needed_is_named() -> None:
    stale = allowed(0, function="step", line_text="x.item()")
    report = msgspec.structs.replace(REPORT, allowed=(allowed(1), allowed(3), stale))
    assert gate.render(report, (), NAME) == (
        "allowed by torchtrim-allow.toml: 4 a step at 2 places\n"
        "no longer needed in torchtrim-allow.toml, delete these entries:\n"
        "  TT101  train.py step  x.item()\n"
    )


def test_it_is_short_and_inert() -> None:
    over = PassedLimit(limit="much", findings=samples.HOSTILE_REPORT.findings * 9)
    stale = tuple(allowed(0, line_text=samples.HOSTILE * 50) for _ in range(40))
    text = gate.render(msgspec.structs.replace(REPORT, allowed=stale), (over,), NAME, "ascii")
    lines = text.splitlines()
    assert len(lines) == 1 + 9 + 1 + 9
    assert max(map(len, lines)) <= 200
    assert any(line.endswith("... (whole in report.json)") for line in lines)
    assert text.isascii()
    assert "\x1b" not in text
    assert "and 37 more" in text
