"""Facts of a profile: who holds memory and when, what syncs cost, where a finding points."""
