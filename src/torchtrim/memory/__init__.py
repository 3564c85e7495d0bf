"""What memory a step holds, when, and why: pure functions of a profile."""

from torchtrim.memory.gradients import Zeroed as Zeroed
from torchtrim.memory.gradients import zeroed_gradients as zeroed_gradients
from torchtrim.memory.packing import Buffer as Buffer
from torchtrim.memory.packing import Packing as Packing
from torchtrim.memory.packing import pack as pack
from torchtrim.memory.packing import why_invalid as why_invalid
from torchtrim.memory.peak import holders as holders
from torchtrim.memory.saved import released_by_recompute as released_by_recompute
from torchtrim.memory.saved import saved_by_module as saved_by_module
from torchtrim.memory.saved import saved_storages as saved_storages
from torchtrim.memory.timeline import Sample as Sample
from torchtrim.memory.timeline import Timeline as Timeline
from torchtrim.memory.timeline import by_kind as by_kind
from torchtrim.memory.timeline import kinds_over_time as kinds_over_time
from torchtrim.memory.timeline import peak_operator as peak_operator
from torchtrim.memory.timeline import peak_without as peak_without
from torchtrim.memory.timeline import timeline as timeline
from torchtrim.memory.why import why_alive as why_alive
