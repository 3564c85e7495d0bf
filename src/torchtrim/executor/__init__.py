"""Apply techniques to live models: registry, swapped forwards, saved tensors, ordinals, handles, export."""
