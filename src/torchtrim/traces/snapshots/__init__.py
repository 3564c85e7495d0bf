"""Memory snapshots of `torch.cuda.memory._dump_snapshot`: read, replayed, explained."""
