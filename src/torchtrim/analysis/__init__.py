"""Facts of a profile: what holds memory and when, what syncs cost, where a finding points."""
