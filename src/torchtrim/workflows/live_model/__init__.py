"""Plans the memory of a live model, applies the plan, verifies it."""
