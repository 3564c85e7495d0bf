"""Bounded state for endless inference: volatile entries go, positions stay, results do not change."""

from torchtrim.stream.declared import BoundCaches, bound_caches
from torchtrim.stream.kv import SinkWindow, sink_cache, window_mask
from torchtrim.stream.learn import Learnt, Observed, Trial, learn_state, try_lifetimes
from torchtrim.stream.lifetimes import Lifetime, persistent, pinned, until_read, volatile, window
from torchtrim.stream.policies import Cheapest, Largest, LeastRead, LeastRecent, Oldest, Policy
from torchtrim.stream.positions import SharedPositions, share_positions
from torchtrim.stream.predictors import BoundPredictorState, bound_state
from torchtrim.stream.sessions import BoundSession, bound_session
from torchtrim.stream.slots import OverBudget
from torchtrim.stream.spill import FileSpill, HostSpill, Spill, SpillFailed
from torchtrim.stream.storages import held_bytes, state_bytes
from torchtrim.stream.store import StateStore
from torchtrim.stream.tombstones import Evicted, Tombstone
from torchtrim.stream.watermarks import Level, MemoryExhausted, UnmanagedMemory, Watermarks

__all__ = [
    "BoundCaches",
    "BoundPredictorState",
    "BoundSession",
    "Cheapest",
    "Evicted",
    "FileSpill",
    "HostSpill",
    "Largest",
    "Learnt",
    "LeastRead",
    "LeastRecent",
    "Level",
    "Lifetime",
    "MemoryExhausted",
    "Observed",
    "Oldest",
    "OverBudget",
    "Policy",
    "SharedPositions",
    "SinkWindow",
    "Spill",
    "SpillFailed",
    "StateStore",
    "Tombstone",
    "Trial",
    "UnmanagedMemory",
    "Watermarks",
    "bound_caches",
    "bound_session",
    "bound_state",
    "held_bytes",
    "learn_state",
    "persistent",
    "pinned",
    "share_positions",
    "sink_cache",
    "state_bytes",
    "try_lifetimes",
    "until_read",
    "volatile",
    "window",
    "window_mask",
]
