"""Renders a memory snapshot on a terminal: the peak, its holders, what is reserved but unused, what helps."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from torchtrim.core.units import counted, format_bytes
from torchtrim.records.snapshot_report import (
    DeviceSnapshot,
    Kind,
    OutOfMemory,
    SettingTried,
    SnapshotHolder,
    SnapshotReport,
)
from torchtrim.report.blocks import WIDEST, Column, TextTable, labelled, show
from torchtrim.report.safe import clean, keep_right

_LABEL = 10  # The longest label and two blanks.
_FIGURES = 33  # The columns of figures, with their gaps.
_WITHOUT_STACK: dict[Kind, str] = {
    "held before": "before the recording began",
    "backward": "autograd; it has no Python stack",
    "forward": "no stack was recorded",
    "optimizer": "no stack was recorded",
    "other": "no stack was recorded",
}


def render(report: SnapshotReport, console: Console, *, top: int) -> None:
    """Print the report: `top` holders of each device."""
    width = max(40, min(console.width, WIDEST))
    lines: list[Text] = []
    for device in report.devices:
        if lines:
            lines.append(Text())
        lines += _device(device, top, width)
    for note in report.notes:
        lines += _said("note", note, width)
    if report.devices:
        lines.append(Text("next".ljust(_LABEL), "bold").append(next_command(report), "bold cyan"))
    show(lines, console)


def headline(device: DeviceSnapshot) -> str:
    """Return the one sentence on a device."""
    if device.ooms:
        first = device.ooms[0]
        return (
            f"Out of memory on device {device.device}: {format_bytes(first.size)} asked for at "
            f"{first.place or 'an unknown place'}, {format_bytes(first.device_free)} free on the device."
        )
    unused = device.peak_reserved - device.peak_allocated
    return (
        f"Peak on device {device.device}: {format_bytes(device.peak_allocated)} allocated, "
        f"{format_bytes(device.peak_reserved)} reserved ({unused / max(device.peak_reserved, 1):.0%} of "
        "it unused)."
    )


def sentences(device: DeviceSnapshot) -> Iterator[tuple[str, str]]:
    """Yield the lines about a device, each with its label."""
    for failure in device.ooms:
        yield "why", _why(failure, device)
    slack = device.slack
    yield (
        "unused",
        f"{format_bytes(slack.cached)} in segments that are free, {format_bytes(slack.split)} in "
        f"{counted(slack.pieces, 'free piece')} of segments in use, {format_bytes(slack.rounding)} by "
        "rounding, at the peak of reserved memory",
    )
    yield "settings", _advice(device)
    if device.arena is not None:
        yield (
            "packed",
            (
                f"one arena with fixed places would hold all requests in {format_bytes(device.arena)}"
            ),
        )
    yield "evidence", _evidence(device)


def next_command(report: SnapshotReport) -> str:
    """Return what to type next: the setting that helps, or a plan."""
    best = next((device.best for device in report.devices if device.best), None)
    if best is not None:
        return f"export PYTORCH_CUDA_ALLOC_CONF={best.conf}"
    return "torchtrim optimize SCRIPT --memory 60%"


def _device(device: DeviceSnapshot, top: int, width: int) -> Iterator[Text]:
    yield Text(clean(headline(device)), "bold red" if device.ooms else "bold")
    yield from _holders(device, top, width)
    for label, text in sentences(device):
        yield from _said(label, text, width)


def _holders(device: DeviceSnapshot, top: int, width: int) -> Iterator[Text]:
    room = width - _FIGURES
    columns = (
        Column(head="bytes", width=10, gap=0, right=True),
        Column(head="blocks", width=7, gap=1, right=True),
        Column(head="from", width=11, gap=2),
        Column(head="allocated at", width=room, gap=2),
    )
    rows = [
        (format_bytes(each.bytes), f"{each.count:,}", each.kind, place(each, room))
        for each in device.holders[:top]
    ]
    yield from TextTable(columns, rows).lines(width)
    if rest := device.holders[top:]:
        total = sum(each.bytes for each in rest)
        yield Text(
            f"{format_bytes(total):>10} {'':7}  in {counted(len(rest), 'more place')}", "dim"
        )


def place(holder: SnapshotHolder, room: int | None = None) -> str:
    """Return where a block was allocated, in words; in `room` cells without the library's function."""
    if not holder.path:
        return clean(holder.by or _WITHOUT_STACK[holder.kind])
    own = clean(f"{holder.path}:{holder.line} {holder.function}")
    whole = f"{own} in {clean(holder.by)}" if holder.by else own
    if room is None or len(whole) <= room:
        return whole
    return keep_right(own, room)


def _why(failure: OutOfMemory, device: DeviceSnapshot) -> str:
    text = (
        f"{format_bytes(failure.allocated)} were in use and {format_bytes(failure.cached)} cached in "
        f"{counted(failure.pieces, 'piece')}, the largest {format_bytes(failure.largest)}; "
    )
    missing = failure.size - failure.device_free - failure.cached
    if missing > 0:
        return (
            text
            + f"{format_bytes(missing)} too little however it lies: the peak itself has to fall"
        )
    if failure.met_by:
        return text + f"enough, but in pieces: it fits with {', '.join(failure.met_by)}"
    return text + "enough, but in pieces, and no setting tried makes room"


def _advice(device: DeviceSnapshot) -> str:
    base, best = device.base, device.best
    others = "; ".join(_setting(each, base) for each in device.tried[1:])
    if best is None:
        start = f"none holds less than {base.conf or 'the defaults'}"
    else:
        saved = base.peak_reserved - best.peak_reserved
        start = f"{best.conf} holds {format_bytes(saved)} less ({saved / base.peak_reserved:.1%})"
    held = format_bytes(base.peak_reserved)
    return f"{start}. From an empty cache: {base.conf or 'defaults'} {held}; {others}"


def _setting(tried: SettingTried, base: SettingTried) -> str:
    if tried.full:
        return f"{tried.conf} runs out of memory"
    change = tried.peak_reserved / max(base.peak_reserved, 1) - 1
    return f"{tried.conf} {change:+.1%}"


def _evidence(device: DeviceSnapshot) -> str:
    seen = device.evidence
    exact = (
        "reserved exactly as recorded"
        if seen.exact
        else (
            f"reserved {format_bytes(seen.peak_reserved)} where {format_bytes(seen.recorded_peak_reserved)} "
            "were recorded: figures of settings are estimates"
        )
    )
    return (
        f"replayed, {seen.same:,} of {seen.allocations:,} blocks lie at the GPU's address, "
        f"{seen.device_calls:,} of {seen.recorded_device_calls:,} calls of the device, {exact}"
    )


def _said(label: str, text: str, width: int) -> list[Text]:
    return labelled(label, [clean(text)], width, indent=_LABEL, lines=6)
