"""An emulated CUDA device: a script written for CUDA runs where there is none, and computes the same.

Tensors are plain CPU tensors whose storages carry a logical device (`tags`); one dispatch mode (`mode`)
runs each operator on CPU and says where its results lie; what asks for a device is answered by stand-ins.
"""

from torchtrim.emulator.device import Emulation as Emulation
from torchtrim.emulator.device import current as current
from torchtrim.emulator.device import emulate as emulate
