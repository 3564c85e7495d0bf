"""This machine in words: the processor, its threads, the GPU that was used."""

from __future__ import annotations

import os
import platform

import torch


def machine(device: str) -> str:
    """The processor, its threads and, where it was used, the GPU."""
    facts = [platform.system(), platform.machine(), f"{os.cpu_count()} cores"]
    facts.append(f"{torch.get_num_threads()} torch threads")
    if device.startswith("cuda") and torch.cuda.is_available():
        facts.append(torch.cuda.get_device_name(device))
    return ", ".join(facts)
