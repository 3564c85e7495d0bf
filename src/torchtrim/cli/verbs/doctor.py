"""`torchtrim doctor`: versions of packages, devices, and a test of the recorder."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import click

from torchtrim.errors import UsageError


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
@click.option(
    "--gpu",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Compare the emulated device with this machine's GPU, in minutes, and write the results to FILE.",
)
@click.argument("scripts", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
def command(as_json: bool, gpu: Path | None, scripts: tuple[Path, ...]) -> None:
    """Show versions and devices, and try the recorder and torch.compile on a small model.

    With --gpu, each of SCRIPTS is also planned without the GPU and verified on it. The exit code is 1 if a
    check does not hold. Attach the file to an issue.
    """
    if gpu is not None:
        _compare_gpu(gpu, scripts)
    if scripts:
        raise UsageError("SCRIPTS are verified on a GPU: add --gpu FILE, which gets the results.")
    facts = _facts()
    lines = (f"{name:20} {value}" for name, value in facts.items())
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(lines))


def _compare_gpu(path: Path, scripts: tuple[Path, ...]) -> None:
    import msgspec

    from torchtrim.api import battery, battery_lines
    from torchtrim.cli.progress import progress
    from torchtrim.records.files import write_atomically

    with progress(begins="operators") as tell:
        report = battery(tell, scripts)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    click.echo("\n".join((*battery_lines(report), f"wrote {path}")))
    raise click.exceptions.Exit(0 if report.holds else 1)


def _facts() -> dict[str, Any]:
    import torch

    from torchtrim.api import untested_torch

    facts: dict[str, Any] = {
        name: importlib.metadata.version(name)
        for name in ("torchtrim", "torch", "click", "rich", "msgspec")
    }
    if warning := untested_torch(facts["torch"]):
        facts["warning"] = warning
    facts["python"] = platform.python_version()
    facts["system"] = f"{platform.system()} {platform.machine()}"
    cuda = torch.cuda.is_available()
    facts["cuda"] = torch.cuda.get_device_name() if cuda else "no device"
    facts["recorder"] = _try_recorder()
    facts["torch.compile"] = _try_compiled()
    return facts


def _try_compiled() -> str:
    """Compile a small model through torch's private interfaces, which differ between its versions."""
    try:
        from torchtrim.api import probe_compiled

        return probe_compiled()
    except Exception as error:  # whatever a version of torch raises
        return f"fails, so scripts that compile run eagerly: {type(error).__name__}: {error}"


def _try_recorder() -> str:
    import torch

    from torchtrim import TrainStep, record

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, torch.ones(2, 4))
    profile = record(step)
    return f"works: {len(profile.operators)} operators, peak {profile.peak_bytes} bytes"
