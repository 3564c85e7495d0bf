"""Named devices, the time that operators would take on them, and what waits would cost."""
