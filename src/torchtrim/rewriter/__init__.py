"""Writes fixes into source: what a fix is, the registry, edits, guards, files, the undo journal."""
