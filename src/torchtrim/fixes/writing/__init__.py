"""What a fix puts into the source: edits, what they need where they go, and the files they end up in."""
