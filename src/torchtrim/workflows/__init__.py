"""The verbs' stories: each runs a workload, plans, applies, verifies and reports."""
