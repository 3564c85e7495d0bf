"""Runs a recorded program again, with waits left out, and prices them."""
