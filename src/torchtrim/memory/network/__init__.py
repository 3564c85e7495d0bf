"""Memory planning for a network's graph: execution order, in-place reuse and buffer offsets.

Pure functions of a recorded graph. They need no torch.
"""

from torchtrim.memory.network.graph import Cut as Cut
from torchtrim.memory.network.graph import Graph as Graph
from torchtrim.memory.network.graph import Node as Node
from torchtrim.memory.network.graph import best_cut as best_cut
from torchtrim.memory.network.layout import Layout as Layout
from torchtrim.memory.network.layout import best_order as best_order
from torchtrim.memory.network.layout import lay_out as lay_out
