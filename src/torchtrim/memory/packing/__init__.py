"""Offsets for buffers with lifetimes: greedy orders, then a search; a validator that shares no code."""

from torchtrim.memory.packing.buffers import Buffer as Buffer
from torchtrim.memory.packing.buffers import Packing as Packing
from torchtrim.memory.packing.pack import pack as pack
from torchtrim.memory.packing.validate import why_invalid as why_invalid
