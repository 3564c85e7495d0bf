"""The command line is frozen: a verb or an option that comes or goes is a change of CONTRACT here."""

import click
import pytest

from torchtrim.cli import main

SHOWN = ("--json", "--format", "--verbose", "-v", "--quiet", "-q")
WHICH = ("--module", "-m", "--steps", "--warmup", "--processes", "--timeout", "--device")
RUNS = (*WHICH, *SHOWN)
FITS = ("--memory", "--memory-kind", "--host-memory", "--allow")
PLANS = (*FITS, "--plan")
OPTIONS = {
    "compare": ("--fail-on", "--json", "--format"),
    "diagnose": (
        *RUNS,
        "--streams",
        "--out",
        "--no-source",
        "--fail-on",
        "--max-syncs",
        "--max-peak",
        "--allow",
        "--capture",
        "--update-allow",
    ),
    "doctor": ("--json", "--gpu"),
    "estimate": (
        *("--module", "-m", "--timeout", "--device", *SHOWN),
        *(
            "--fits",
            "--max-batch",
            "--memory-kind",
            "--out",
            "--no-source",
            "--ranks",
            "--fsdp",
            "--fsdp-blocks",
        ),
        *("--fsdp-dtype", "--fsdp-no-reshard", "--fsdp-offload"),
    ),
    "explain": ("--json",),
    "export": ("--perfetto", "--no-source"),
    "lint": ("--fix", "--unsafe-fixes", "--diff", "--select", "--format", "--no-cache"),
    "optimize": (
        *RUNS,
        *PLANS,
        *("--out", "--no-source", "--mode", "--candidates", "--fix", "--unsafe-fixes"),
    ),
    "pack": ("--capacity", "--out", "--svg", "--alignment", "--seconds", "--json"),
    "plan": (
        *RUNS,
        *PLANS,
        *("--out", "--no-source", "--frontier", "--export", "--find-batch"),
        *("--stages", "--replicas"),
    ),
    "run": (
        *("--module", "-m", "--plan", "--processes", "--verify-every", "--on-difference"),
        *("--on-oom", "--quiet", "--verbose"),
    ),
    "snapshot": ("--setting", "--top", "--page", "--json", "--fail-on-oom"),
    "stream-check": (
        *RUNS[:2],
        *("--timeout", *SHOWN, "--frames", "--frames-of"),
        *("--out", "--no-source", "--max-growth"),
    ),
    "trace": ("--json", "--max-syncs", "--source", "--top"),
    "tune-loader": (
        *("--module", "-m", "--timeout", "--device", *SHOWN),
        *("--seconds", "--host-memory", "--cores"),
    ),
    "undo": (),
    "verify": (
        *RUNS,
        "--streams",
        *("--out", "--no-source", "--plan", "--check", "--stream", "--frames", "--frames-of"),
    ),
}
ARGUMENTS = {
    "compare": ("before", "after"),
    "diagnose": ("script", "args"),
    "doctor": ("scripts",),
    "estimate": ("script", "args"),
    "explain": ("code",),
    "export": ("profile",),
    "lint": ("paths",),
    "optimize": ("script", "args"),
    "pack": ("file",),
    "plan": ("script", "args"),
    "run": ("script", "args"),
    "snapshot": ("file",),
    "stream-check": ("script", "args"),
    "trace": ("paths",),
    "tune-loader": ("script", "args"),
    "undo": ("path",),
    "verify": ("script", "args"),
}
MOST_OPTIONS = 22


def verb(name: str) -> click.Command:
    found = main.torchtrim.get_command(click.Context(main.torchtrim), name)
    assert found is not None
    return found


def test_the_verbs() -> None:
    assert set(main.torchtrim.list_commands(click.Context(main.torchtrim))) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_of_a_verb(name: str) -> None:
    found = [o for p in verb(name).params if isinstance(p, click.Option) for o in p.opts]
    assert sorted(found) == sorted(OPTIONS[name])
    assert len([p for p in verb(name).params if isinstance(p, click.Option)]) <= MOST_OPTIONS


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_arguments_of_a_verb(name: str) -> None:
    found = [p.name for p in verb(name).params if isinstance(p, click.Argument)]
    assert tuple(found) == ARGUMENTS[name]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_verb_and_each_of_its_options_say_what_they_are(name: str) -> None:
    assert verb(name).help
    options = [p for p in verb(name).params if isinstance(p, click.Option)]
    assert [option.name for option in options if not option.help] == []


def test_the_settings_that_pyproject_may_set_are_options() -> None:
    every = {option.removeprefix("--").replace("-", "_") for o in OPTIONS.values() for option in o}
    assert set(main._SETTINGS) <= every


def test_no_verb_of_that_name() -> None:
    assert main.torchtrim.get_command(click.Context(main.torchtrim), "main") is None
