"""Packing of buffers with lifetimes: greedy orders, a search, and an independent validator."""

from torchtrim.memory.packing.buffers import Buffer as Buffer
from torchtrim.memory.packing.buffers import Packing as Packing
from torchtrim.memory.packing.packer import pack as pack
from torchtrim.memory.packing.validate import why_invalid as why_invalid
