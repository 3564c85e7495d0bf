"""Notebook support: records render as HTML, and `%%torchtrim` measures a cell.

    %load_ext torchtrim.notebook

    %%torchtrim --device emulated
    model(batch).sum().backward()

The magic shows where the cell synchronizes with a GPU and how much memory it needs. Records also render
without the first line, as soon as `torchtrim` is imported.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torchtrim.core.units import counted
from torchtrim.errors import UsageError

if TYPE_CHECKING:
    from torchtrim.api import Measured
    from torchtrim.report.cell import NotebookRecord

_RECORDS = {
    "Report": "torchtrim.records.report",
    "Profile": "torchtrim.records.profile",
    "Finding": "torchtrim.records.finding",
    "Plan": "torchtrim.records.plan",
    "Certificate": "torchtrim.records.certificate",
}


def load_ipython_extension(shell: Any) -> None:
    """Register the magic and the HTML renderers; called by `%load_ext torchtrim.notebook`."""
    show_records(shell)
    shell.register_magic_function(Magic(shell).run, "cell", "torchtrim")


def show_records(shell: Any) -> None:
    """Register HTML and text renderers of records in an IPython shell. Imports nothing until one renders."""
    formatters = shell.display_formatter.formatters
    for name, module in _RECORDS.items():
        formatters["text/html"].for_type_by_name(module, name, _as_html)
        formatters["text/plain"].for_type_by_name(module, name, _as_text)


def _as_html(record: NotebookRecord) -> str:
    from torchtrim.report import cell

    return cell.html(record)


def _as_text(record: NotebookRecord, printer: Any, cycle: bool) -> None:
    from torchtrim.report import cell

    printer.text(cell.text(record))


class Magic:
    """The cell magic of one IPython shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def run(self, line: str, cell: str) -> Measured | None:
        """Run the cell in the notebook's namespace and show its syncs and its memory."""
        from torchtrim.api import measure

        try:
            options = _options(line)
            found = measure(self._call(cell), warmup=options.warmup, device=options.device)
        except _CellFailed:
            return None
        except UsageError as error:
            print(f"error: {error}")
            return None
        self._show(found)
        return found if options.keep else None

    def _call(self, cell: str) -> Callable[[], None]:
        def run() -> None:
            result = self._shell.run_cell(cell, store_history=False)
            if not result.success:
                raise _CellFailed

        run.__qualname__ = "the cell"
        return run

    def _show(self, found: Measured) -> None:
        for line in sync_lines(found):
            print(line)
        data, metadata = self._shell.display_formatter.format(found.profile)
        self._shell.display_pub.publish(data, metadata)


def sync_lines(found: Measured) -> list[str]:
    """Return one line of text for each sync of a call."""
    from torchtrim.report import facts
    from torchtrim.report.safe import clean

    lines = [counted(sum(times for *_, times in found.waits), "host-device sync")]
    for path, line, what, _, times in found.waits:
        where = clean(facts.place(path, line).rpartition("/")[2])
        lines.append(f"  {times} x {where}  {clean(what)}")
    return lines


class _CellFailed(Exception):
    """The cell raised, and IPython has already shown the traceback."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%torchtrim: {message}. Example: %%torchtrim --device emulated")


def _options(line: str) -> argparse.Namespace:
    parser = _Parser(prog="%%torchtrim", add_help=False)
    parser.add_argument("--device", choices=["cpu", "emulated", "cuda"])
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    return parser.parse_args(shlex.split(line))
