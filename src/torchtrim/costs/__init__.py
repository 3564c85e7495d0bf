"""Named devices, the time that operators take on them, and what host-device syncs cost."""
