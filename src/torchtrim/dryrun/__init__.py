"""Runs a program dry: operators return results of the right shape, without computing or memory."""
