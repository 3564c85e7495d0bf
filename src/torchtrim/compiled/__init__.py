"""Graphs of `torch.compile`: their memory, simulated from Inductor's code, and plans for what they save."""
