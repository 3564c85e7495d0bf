"""What grows in a stream, and whether its bounds change what it computes."""
