"""torchtrim: fit a PyTorch program into a memory budget, and prove that it is the same program."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torchtrim.api import Fitted as Fitted
    from torchtrim.api import FittedMemory as FittedMemory
    from torchtrim.api import apply as apply
    from torchtrim.api import assert_same as assert_same
    from torchtrim.api import count_memory as count_memory
    from torchtrim.api import diagnose as diagnose
    from torchtrim.api import estimate as estimate
    from torchtrim.api import find_batch as find_batch
    from torchtrim.api import fit as fit
    from torchtrim.api import fix_source as fix_source
    from torchtrim.api import measure as measure
    from torchtrim.api import optimize_memory as optimize_memory
    from torchtrim.api import plan as plan
    from torchtrim.api import record as record
    from torchtrim.api import verify as verify
    from torchtrim.capture.growth.records import measure_growth as measure_growth
    from torchtrim.capture.workload import Inference as Inference
    from torchtrim.capture.workload import TrainStep as TrainStep
    from torchtrim.certify.functions import same_as as same_as
    from torchtrim.emulator import emulate as emulate
    from torchtrim.errors import ApplyFailed as ApplyFailed
    from torchtrim.errors import InfeasibleBudget as InfeasibleBudget
    from torchtrim.errors import ScriptFailed as ScriptFailed
    from torchtrim.errors import TorchtrimError as TorchtrimError
    from torchtrim.errors import UnreadableInput as UnreadableInput
    from torchtrim.errors import Unsupported as Unsupported
    from torchtrim.errors import UsageError as UsageError
    from torchtrim.linter.files import lint as lint
    from torchtrim.records import Certificate as Certificate
    from torchtrim.records import Finding as Finding
    from torchtrim.records import Plan as Plan
    from torchtrim.records import Profile as Profile
    from torchtrim.records.files import load_plan as load_plan
    from torchtrim.records.files import load_profile as load_profile
    from torchtrim.records.files import save_plan as save_plan
    from torchtrim.records.files import save_profile as save_profile
    from torchtrim.records.sharding import Sharding as Sharding
    from torchtrim.runner.script import Script as Script
    from torchtrim.stream import StateStore as StateStore
    from torchtrim.stream import bound_caches as bound_caches
    from torchtrim.stream import bound_session as bound_session
    from torchtrim.stream import bound_state as bound_state
    from torchtrim.stream import learn_state as learn_state
    from torchtrim.stream import share_positions as share_positions
    from torchtrim.stream import sink_cache as sink_cache
    from torchtrim.stream import try_lifetimes as try_lifetimes
    from torchtrim.workflows.estimate import Estimate as Estimate
    from torchtrim.workflows.estimate import spread_over as spread_over
    from torchtrim.workflows.trace import diagnose_traces as diagnose_traces

_HOMES = {
    "torchtrim.api": (
        "Fitted",
        "FittedMemory",
        "apply",
        "assert_same",
        "count_memory",
        "fix_source",
        "diagnose",
        "estimate",
        "find_batch",
        "fit",
        "measure",
        "optimize_memory",
        "plan",
        "record",
        "verify",
    ),
    "torchtrim.certify.functions": ("same_as",),
    "torchtrim.workflows.estimate": ("Estimate", "spread_over"),
    "torchtrim.errors": (
        "ApplyFailed",
        "InfeasibleBudget",
        "ScriptFailed",
        "TorchtrimError",
        "UnreadableInput",
        "Unsupported",
        "UsageError",
    ),
    "torchtrim.emulator": ("emulate",),
    "torchtrim.workflows.trace": ("diagnose_traces",),
    "torchtrim.runner.script": ("Script",),
    "torchtrim.capture.workload": ("Inference", "TrainStep"),
    "torchtrim.capture.growth.records": ("measure_growth",),
    "torchtrim.linter.files": ("lint",),
    "torchtrim.stream": (
        "StateStore",
        "bound_caches",
        "bound_session",
        "bound_state",
        "learn_state",
        "share_positions",
        "sink_cache",
        "try_lifetimes",
    ),
    "torchtrim.records": ("Certificate", "Finding", "Plan", "Profile"),
    "torchtrim.records.sharding": ("Sharding",),
    "torchtrim.records.files": ("load_plan", "load_profile", "save_plan", "save_profile"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


if "IPython" in sys.modules and (_shell := sys.modules["IPython"].get_ipython()) is not None:
    importlib.import_module("torchtrim.notebook").show_records(_shell)


_REMOVED = {
    "saving_by_batch": "call count_memory and optimize_memory with inputs of each batch size"
}


def __getattr__(name: str) -> Any:
    if name in _REMOVED:
        raise AttributeError(f"torchtrim.{name} was removed: {_REMOVED[name]}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
