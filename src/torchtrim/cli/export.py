"""`torchtrim export`: a profile in a form that other tools read."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--perfetto",
    "perfetto_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OUT",
    required=True,
    help="Write a trace for ui.perfetto.dev and chrome://tracing.",
)
@click.option("--no-source", is_flag=True, help="No paths and lines in it.")
def command(profile: Path, perfetto_path: Path, no_source: bool) -> None:
    """Write PROFILE, a profile.json, as a trace: operators, modules, waits, memory, findings."""
    import msgspec

    from torchtrim.records.files import load_profile, write_atomically
    from torchtrim.report import perfetto
    from torchtrim.report.safe import clean, scrubbed
    from torchtrim.rules.prices import priced
    from torchtrim.rules.registry import diagnose

    loaded = load_profile(profile)
    findings, waiting = priced(loaded, diagnose(loaded))
    if no_source:
        findings = tuple(
            msgspec.structs.replace(f, message=scrubbed(f.message, (loaded.script, f.path)))
            for f in findings
        )
    trace = perfetto.render(loaded, findings, waiting, source=not no_source)
    write_atomically(perfetto_path, trace)
    click.echo(f"wrote {clean(str(perfetto_path))}: open it in https://ui.perfetto.dev")
