"""Fits a workload into a budget: plan, apply, measure, correct, verify."""
