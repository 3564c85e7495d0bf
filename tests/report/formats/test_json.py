from pathlib import Path

import msgspec
import pytest

from report import samples
from torchtrim.records import Profile, Report
from torchtrim.report import schemas
from torchtrim.report.formats import json

PUBLISHED = Path(__file__).parents[3] / "docs" / "schema"


@pytest.mark.parametrize("name", samples.ALL)
def test_it_reads_back_as_the_same_report(name: str) -> None:
    report = samples.ALL[name]
    assert msgspec.json.decode(json.render(report), type=Report) == report


def test_the_key_facts_stand_where_people_script_against_them() -> None:
    data = msgspec.json.decode(json.render(samples.OPTIMIZE))
    assert data["schema_version"] == 2
    assert data["original"]["peak_bytes"] == 412 * samples.MIB
    assert data["planned"]["peak_bytes"] == 236 * samples.MIB
    assert data["budget_bytes"] == 247 * samples.MIB
    assert data["certificate"]["verdict"] == "BITWISE"
    assert [f["code"] for f in data["findings"]] == [f.code for f in samples.FINDINGS]


def test_what_was_not_measured_is_null_and_present() -> None:
    data = msgspec.json.decode(json.render(samples.DIAGNOSE))
    assert {"planned": None, "plan": None, "certificate": None}.items() <= data.items()


def test_the_order_is_the_record_s_whatever_order_the_kinds_came_in() -> None:
    turned = dict(reversed(samples.ORIGINAL.by_kind.items()))
    original = msgspec.structs.replace(samples.ORIGINAL, by_kind=turned)
    turned_report = msgspec.structs.replace(samples.OPTIMIZE, original=original)
    assert json.render(turned_report) == json.render(samples.OPTIMIZE)
    keys = list(msgspec.json.decode(json.render(samples.OPTIMIZE)))
    assert keys == [field.name for field in msgspec.structs.fields(Report)]


def test_it_ends_with_a_newline_and_holds_no_raw_control_character() -> None:
    rendered = json.render(samples.HOSTILE_REPORT)
    assert rendered.endswith(b"}\n")
    assert b"\x1b" not in rendered


def test_a_file_name_that_utf8_cannot_hold_is_no_crash() -> None:
    report = msgspec.structs.replace(samples.VERIFY, script="caf\udce9.py")
    assert msgspec.json.decode(json.render(report))["script"] == "caf?.py"


@pytest.mark.parametrize("name", schemas.schemas())
def test_the_published_schema_is_current(name: str) -> None:
    assert (PUBLISHED / name).read_bytes() == schemas.schemas()[name], (
        "run `python -m torchtrim.report.schemas docs/schema`"
    )


def test_the_published_schema_names_every_field() -> None:
    for record in (Report, Profile):
        schema = msgspec.json.schema(record)
        name = record.__name__
        published = msgspec.json.decode((PUBLISHED / f"{name.lower()}.schema.json").read_bytes())
        assert set(published["$defs"]) == set(schema["$defs"])
        fields = {field.name for field in msgspec.structs.fields(record)}
        assert set(published["$defs"][name]["properties"]) == fields


def test_schemas_are_written_into_a_new_folder(tmp_path: Path) -> None:
    schemas.write(tmp_path / "new")
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert written == dict(schemas.schemas())
