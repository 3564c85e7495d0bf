"""What the user's source says: its text and tree, its names, what is pure, what it selects and reads."""
