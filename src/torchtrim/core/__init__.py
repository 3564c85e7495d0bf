"""What every room uses: units, caches, clocks, and the isolation of parts that fail."""
