"""The cost of a data loader to a step, and its settings. Plain data; times are in seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=4096)]


class LoaderSettings(Struct, frozen=True, kw_only=True):
    """How a loader reads ahead. `prefetch`: batches that each worker prepares in advance.

    `whole`: the data set is indexed with a whole batch at once, without collating.
    """

    workers: Count = 0
    prefetch: Count = 2
    pinned: bool = False
    persistent: bool = False
    whole: bool = False

    @property
    def ahead(self) -> int:
        """Batches held in memory before the loop requests them."""
        return self.workers * self.prefetch


class BatchParts(Struct, frozen=True, kw_only=True):
    """The cost of one batch, measured in a process that does nothing else.

    `reading`: time the processor was idle, waiting for a disk or a network. `decoding`: time it computed
    samples. `collating`: time to collate them. `handing`: time the training process needs to receive a batch
    from a worker. `whole`: time to get all samples from the data set at once, None if it
    does not support that. `sample_spread`: standard deviation of the time per sample, divided by its mean.
    `narrow_bytes`: size of the batch in the narrowest types that hold its values exactly; `narrow` lists the
    casts, such as `"float32 -> uint8"`.
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
        """Seconds from the sample indices to the batch."""
        return self.reading + self.decoding + self.collating


class LoaderCost(Struct, frozen=True, kw_only=True):
    """The time of a step with its loader, and of the same step with its batches already in memory.

    `ready_seconds`: the step with its batches in memory, None if not run. `spread_seconds`: the larger range
    of the two. `busy`: cores that the step keeps busy without a loader. `waited_seconds`: time the loop
    waited for batches. `path` and `line`: where the loader was created. `parts`: None if the data set could
    not be read apart from its loader. `free_bytes`: memory the machine had left for batches, 0 if unknown.
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
        """Seconds a step would save if its batches were already in memory.

        Workers also take cores from the step, so the gap can exceed the time the loop waited. A gap within
        the spread of the steps is noise and counts only up to that time.
        """
        waited = min(self.waited_seconds, self.step_seconds)
        if self.ready_seconds is None:
            return waited
        gap = max(self.step_seconds - self.ready_seconds, 0.0)
        return gap if self.settings.workers and gap > self.spread_seconds else min(gap, waited)


class MeasuredSettings(Struct, frozen=True, kw_only=True):
    """Measured settings of a loader: seconds from batch to batch, including the step."""

    settings: LoaderSettings
    seconds: Seconds
    batches: Count


class Tuning(Struct, frozen=True, kw_only=True):
    """The result of tuning. `chosen` takes `after_seconds` per batch, `before` took `before_seconds`.

    `source` is `modelled` if `cores` exceeds the cores of the measurement. `tried` has all settings that were
    measured, `skipped` the reasons for skipping others.
    """

    before: LoaderSettings
    chosen: LoaderSettings
    before_seconds: Seconds
    after_seconds: Seconds
    cores: Count
    source: Literal["measured", "modelled"] = "measured"
    took_seconds: Seconds = 0.0
    tried: tuple[MeasuredSettings, ...] = ()
    skipped: tuple[Text, ...] = ()
    path: Text = ""
    line: Count = 0
