"""Offload of activations: see `technique.py`."""

from torchtrim.techniques.offload_activations.technique import TECHNIQUE as TECHNIQUE
