"""Host-device syncs of PyTorch on CUDA: a table with a source for each row, by family."""
