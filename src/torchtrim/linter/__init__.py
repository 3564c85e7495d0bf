"""From source alone to findings: its host-device syncs, inferred from the types of its expressions."""
