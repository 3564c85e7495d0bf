"""The loss head: linear and cross entropy in chunks of rows, and logits that are there only where read."""
