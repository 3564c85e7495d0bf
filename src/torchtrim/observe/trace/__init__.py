"""Saved profiler traces: which files, their bytes, their events, what they tell. Imports no torch."""

from torchtrim.observe.trace.diagnose import diagnose_traces as diagnose_traces
from torchtrim.observe.trace.folder import find_traces as find_traces
from torchtrim.observe.trace.reader import read_trace as read_trace
