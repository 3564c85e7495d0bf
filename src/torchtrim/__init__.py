"""torchtrim: fit a PyTorch program into a memory budget, and prove that it is the same program."""

__version__ = "0.1.0"
