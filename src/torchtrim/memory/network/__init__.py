"""Plans the memory of a network's graph: the order of its operators, who overwrites whom, and where.

Pure functions of a record of the graph, which needs no torch.
"""

from torchtrim.memory.network.cut import Cut as Cut
from torchtrim.memory.network.cut import best_cut as best_cut
from torchtrim.memory.network.graph import Graph as Graph
from torchtrim.memory.network.graph import Node as Node
from torchtrim.memory.network.layout import Layout as Layout
from torchtrim.memory.network.layout import lay_out as lay_out
from torchtrim.memory.network.ordering import best_order as best_order
