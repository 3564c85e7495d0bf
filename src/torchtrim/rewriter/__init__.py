"""Writes fixes into source: fixes and their discovery, edits, guards, files and their undo journal."""
