"""Packs buffers, plans the memory of a network's graph, and models the caching allocator."""
