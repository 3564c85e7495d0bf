"""An emulated CUDA device: runs a script written for CUDA on a machine without, with the same results.

Tensors are plain CPU tensors whose storages are tagged with a logical device (`tags`). A dispatch mode
(`mode`) runs each operator on the CPU and tags its results. Functions that query a device are replaced.
"""

from torchtrim.emulator.device import Emulation as Emulation
from torchtrim.emulator.device import current as current
from torchtrim.emulator.device import emulate as emulate
