"""What waits for a CUDA device in PyTorch: a table with a source for each row, by families."""
