"""Training scripts drawn from what people do, and what becomes of each under every verb."""
