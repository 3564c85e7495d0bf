"""The workflows behind the verbs: each runs a workload, plans, applies, verifies and reports."""
