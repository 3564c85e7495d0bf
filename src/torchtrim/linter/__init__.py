"""Static analysis: finds host-device syncs in source by inferring the types of its expressions."""
