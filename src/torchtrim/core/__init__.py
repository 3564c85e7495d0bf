"""Foundations that every room uses: units, caches, clocks, and the isolation of failing parts."""
