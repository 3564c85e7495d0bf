"""Host-device syncs, where they are, what removing them would gain. Works on records; imports no torch."""
