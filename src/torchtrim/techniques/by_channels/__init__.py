"""BatchNorm, and what follows it channel by channel, some channels at a time."""
