"""Lines of source at the peak: each once, with all bytes that it allocated."""

from __future__ import annotations

from msgspec.structs import replace

from report import samples
from torchtrim.report.peak_lines import peak_lines

REPEATED = replace(
    samples.OPTIMIZE,
    holders=(
        samples.holder(40, 1, "model.a", samples.MODEL, 42, "saved for backward by relu"),
        samples.holder(100, 1, "model.b", samples.MODEL, 43, "saved for backward by mm"),
        samples.holder(70, 1, "model.c", samples.MODEL, 42, "activation"),
        samples.holder(30, 2, "model.d", "", 0, "parameter"),
    ),
)


def test_a_line_is_there_once_with_its_bytes() -> None:
    found = peak_lines(REPEATED, 30, ())
    assert [(one.place, one.bytes // samples.MIB) for one in found] == [
        ("models/encoder.py:42", 110),
        ("models/encoder.py:43", 100),
        ("", 30),
    ]
    assert [one.owner for one in found[0].holders] == ["model.a", "model.c"]
    assert [one.words for one in found[0].holders] == [
        "activation: saved for backward by relu",
        "activation",
    ]


def test_a_parameter_leads_to_the_line_that_made_its_module() -> None:
    one = replace(REPEATED.holders[3], made_path=samples.MODEL, made_line=9, type="Linear")
    (found,) = peak_lines(replace(REPEATED, holders=(one,)), 30, ())
    assert found.place == "models/encoder.py:9"
    assert found.holders[0].made == ""
    assert found.holders[0].type == "Linear"


def test_shares_are_of_the_peak() -> None:
    found = peak_lines(REPEATED, 1, ())
    assert [round(one.share) for one in found] == [round(100 * 40 / 412)]
