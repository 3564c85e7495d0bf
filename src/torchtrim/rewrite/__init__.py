"""From the user's source to a cure of it: one cure a file, each with what it needs to be sound."""
