"""Bounded state for endless inference: what is volatile goes, positions stay, results do not change."""

from torchtrim.stream.lifetimes import Lifetime, persistent, pinned, until_read, volatile, window
from torchtrim.stream.policies import Cheapest, Largest, LeastRead, LeastRecent, Oldest, Policy
from torchtrim.stream.sessions import BoundSession, bound_session
from torchtrim.stream.slots import OverBudget
from torchtrim.stream.spill import FileSpill, HostSpill, Spill, SpillFailed
from torchtrim.stream.state_bytes import state_bytes
from torchtrim.stream.storages import held_bytes
from torchtrim.stream.store import StateStore
from torchtrim.stream.tombstones import Evicted, Tombstone

__all__ = [
    "BoundSession",
    "Cheapest",
    "Evicted",
    "FileSpill",
    "HostSpill",
    "Largest",
    "LeastRead",
    "LeastRecent",
    "Lifetime",
    "Oldest",
    "OverBudget",
    "Policy",
    "Spill",
    "SpillFailed",
    "StateStore",
    "Tombstone",
    "bound_session",
    "held_bytes",
    "persistent",
    "pinned",
    "state_bytes",
    "until_read",
    "volatile",
    "window",
]
