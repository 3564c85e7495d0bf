"""What a data loader costs a step, and how it is set. Plain data; times are in seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=4096)]


class LoaderSettings(Struct, frozen=True, kw_only=True):
    """How a loader reads ahead. `prefetch`: batches ahead of each worker.

    `whole`: the data set is asked for a batch at once, and nothing is collated.
    """

    workers: Count = 0
    prefetch: Count = 2
    pinned: bool = False
    persistent: bool = False
    whole: bool = False

    @property
    def ahead(self) -> int:
        """Batches that are in memory before they are asked for."""
        return self.workers * self.prefetch


class BatchParts(Struct, frozen=True, kw_only=True):
    """What one batch takes, in one process that does nothing else.

    `reading`: time in which the processor had nothing to do, such as that of a disk or a network.
    `decoding`: time in which it was at work to make the samples. `collating`: putting them together.
    `handing`: what the process that trains has to do to take a batch from a worker. `whole`: the time to
    ask the data set for all samples at once, None where it cannot. `sample_spread`: standard deviation of
    a sample's time over its mean. `narrow_bytes`: what the batch would need in the narrowest types that
    hold its values exactly, and `narrow` says which, such as `"float32 -> uint8"`.
    """

    samples: Count
    bytes: Count
    reading: Seconds
    decoding: Seconds
    collating: Seconds
    handing: Seconds = 0.0
    whole: Seconds | None = None
    sample_spread: Seconds = 0.0
    narrow_bytes: Count = 0
    narrow: tuple[Text, ...] = ()

    @property
    def work(self) -> float:
        """Seconds from the samples' numbers to the batch."""
        return self.reading + self.decoding + self.collating


class LoaderCost(Struct, frozen=True, kw_only=True):
    """A step with its loader, and the same step with its batches already there.

    `ready_seconds`: of the step whose batches were there, None where none was run. `spread_seconds`: the
    largest minus the smallest of either. `busy`: how many cores the step keeps busy without a loader.
    `waited_seconds`: how long the loop waited for batches. `path` and `line` are where the loader was
    made. `parts` is None where the data set could not be asked apart from its loader.
    `free_bytes`: what the machine had left for batches, 0 where unknown.
    """

    step_seconds: Seconds
    ready_seconds: Seconds | None
    waited_seconds: Seconds
    spread_seconds: Seconds = 0.0
    busy: Seconds = 1.0
    batches: Count = 1
    cores: Count = 1
    settings: LoaderSettings = LoaderSettings()
    parts: BatchParts | None = None
    free_bytes: Count = 0
    path: Text = ""
    line: Count = 0

    @property
    def price(self) -> float:
        """Seconds that a step would save with its batches already there.

        Workers also take cores from the step. A gap within the spread of the steps is noise as far as it
        is more than the loop waited.
        """
        waited = min(self.waited_seconds, self.step_seconds)
        if self.ready_seconds is None:
            return waited
        gap = max(self.step_seconds - self.ready_seconds, 0.0)
        return gap if self.settings.workers and gap > self.spread_seconds else min(gap, waited)


class Tried(Struct, frozen=True, kw_only=True):
    """A setting that was measured: seconds from batch to batch, with what is done with it."""

    settings: LoaderSettings
    seconds: Seconds
    batches: Count


class Tuning(Struct, frozen=True, kw_only=True):
    """What a tuner found. `chosen` takes `after_seconds` a batch, `before` took `before_seconds`.

    `source` is `modelled` where `cores` are more than those that were measured on. `tried` are all that
    were measured, `skipped` says why others were not.
    """

    before: LoaderSettings
    chosen: LoaderSettings
    before_seconds: Seconds
    after_seconds: Seconds
    cores: Count
    source: Literal["measured", "modelled"] = "measured"
    took_seconds: Seconds = 0.0
    tried: tuple[Tried, ...] = ()
    skipped: tuple[Text, ...] = ()
    path: Text = ""
    line: Count = 0
