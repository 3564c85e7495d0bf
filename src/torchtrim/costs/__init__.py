"""Named devices, the time that operators take on them, and the cost of host-device syncs."""
