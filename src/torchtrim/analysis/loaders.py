"""Explains a slow loader from the step with and without it and from the parts of one batch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec.structs import replace

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.data.model import Consumer, batch_seconds, enough_workers, memory_bytes
from torchtrim.records.loader import BatchParts, LoaderCost, LoaderSettings

SHARE = 0.05
"""Share of the step's time; less is not a finding, since it is within the spread of the steps."""
Kind = Literal[
    "reading",
    "decoding",
    "collating",
    "handing over",
    "few workers",
    "many workers",
    "one by one",
    "unknown",
]
_CHEAPER = {
    "reading": "read larger pieces, from a nearer disk, or keep what was read in memory",
    "decoding": "decode once and store the result, or transform batches on the device",
    "collating": "have the data set return tensors of one size, or write a collate_fn that copies once",
}


class LoaderVerdict(NamedTuple):
    """The cause of the delay, the evidence for it, and advice."""

    kind: Kind
    because: str
    advice: str


def verdict(cost: LoaderCost) -> LoaderVerdict | None:
    """Return why a loader is slow, or None if it takes less than a twentieth of the step."""
    if not 0 < SHARE * cost.step_seconds <= cost.price:
        return None
    if cost.parts is None:
        # The data set could not be measured.
        if cost.settings.workers >= cost.cores:
            advice = "make reading a sample cheaper: every core has a worker already"
        else:
            advice = (
                f"num_workers={cost.cores}, persistent_workers=True: workers read the next batches "
                "while the step computes"
            )
        return LoaderVerdict("unknown", "", advice)
    return _of_parts(cost, cost.parts)


def _of_parts(cost: LoaderCost, parts: BatchParts) -> LoaderVerdict:
    workers, times = cost.settings.workers, _times(parts)
    if parts.whole is not None and 2 * parts.whole < parts.work:
        why = f"{times}; fetching all samples at once takes {format_seconds(parts.whole)}"
        return LoaderVerdict("one by one", why, _AT_ONCE)
    if workers > cost.cores and parts.reading < parts.work / 2:
        cores = f"{cost.cores} core{'s' * (cost.cores != 1)}"
        why = f"{times}, and {workers} workers share {cores} with the step"
        return LoaderVerdict("many workers", why, _settings_advice(cost, parts))
    if workers and parts.handing > parts.work / workers:
        why = (
            f"{times}; receiving its {format_bytes(parts.bytes)} from a worker takes "
            f"{format_seconds(parts.handing)}"
        )
        return LoaderVerdict("handing over", why, _SMALLER)
    chosen = best_settings(cost, parts)
    if 0 < workers < chosen.workers:
        why = f"{times}, more than {workers} worker{'s' * (workers != 1)} can hide"
        return LoaderVerdict("few workers", why, _settings_advice(cost, parts))
    slowest = _slowest(parts)
    advice = _CHEAPER[slowest]
    if not workers and chosen.workers:
        advice = f"{_settings_advice(cost, parts)}; beyond that, {advice}"
    return LoaderVerdict(slowest, times, advice)


_AT_ONCE = (
    "sampler=BatchSampler(RandomSampler(dataset), batch_size, drop_last=False), batch_size=None: the data "
    "set is indexed with a list, without collating"
)
_SMALLER = (
    "ship narrower types and widen them on the device, crop before and not after the batch is shipped, or "
    "read in the process that trains (num_workers=0)"
)


def best_settings(cost: LoaderCost, parts: BatchParts) -> LoaderSettings:
    """Return the settings that the model predicts to be fastest, within the cores and half of the free
    memory."""
    consumer = consumer_of(cost)
    most = cost.free_bytes // 2 or None
    options = [
        replace(cost.settings, workers=workers, persistent=workers > 0)
        for workers in range(min(cost.cores, enough_workers(parts, cost.settings, consumer)) + 1)
    ]
    fitting = [one for one in options if most is None or memory_bytes(parts, one) <= most]
    return min(
        fitting or options[:1],
        key=lambda one: (batch_seconds(parts, one, consumer, cost.cores), one.workers),
    )


def consumer_of(cost: LoaderCost) -> Consumer:
    """Return the model of the step's work on one batch, without the loader."""
    without = cost.step_seconds - cost.price
    ready = without if cost.ready_seconds is None else cost.ready_seconds
    return Consumer(ready / max(cost.batches, 1), max(cost.busy, 1.0))


def _slowest(parts: BatchParts) -> Literal["reading", "decoding", "collating"]:
    if parts.collating >= max(parts.reading, parts.decoding):
        return "collating"
    return "reading" if parts.reading > parts.decoding else "decoding"


def _times(parts: BatchParts) -> str:
    """Describe a batch's time, largest part first, without parts below a twentieth."""
    named = (
        (parts.reading, "waiting for data"),
        (parts.decoding, "making the samples"),
        (parts.collating, "collating"),
    )
    listed = ", ".join(
        f"{format_seconds(seconds)} {name}"
        for seconds, name in sorted(named, key=lambda part: -part[0])
        if seconds > 0.05 * parts.work
    )
    return f"a batch takes {format_seconds(parts.work)} ({listed})"


def _settings_advice(cost: LoaderCost, parts: BatchParts) -> str:
    chosen = best_settings(cost, parts)
    ahead = batch_seconds(parts, chosen, consumer_of(cost), cost.cores) * max(cost.batches, 1)
    persistent = ", persistent_workers=True" if chosen.workers else ""
    return (
        f"num_workers={chosen.workers}{persistent}: a step then takes about {format_seconds(ahead)}, "
        "as modelled; torchtrim tune-loader measures it"
    )
