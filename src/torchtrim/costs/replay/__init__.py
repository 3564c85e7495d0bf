"""Replays a recorded program without some of its syncs, and prices them."""
