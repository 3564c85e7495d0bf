"""What waits for the device, where, and what it would gain not to. Works on records; imports no torch."""
