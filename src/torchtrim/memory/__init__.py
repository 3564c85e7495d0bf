"""Buffer packing, memory planning for a network's graph, and a model of the caching allocator."""

from torchtrim.memory.packing import Buffer as Buffer
from torchtrim.memory.packing import Packing as Packing
from torchtrim.memory.packing import pack as pack
from torchtrim.memory.packing import why_invalid as why_invalid
