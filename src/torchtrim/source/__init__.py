"""The user's source code: its text and tree, names, pure expressions, selections and reads."""
