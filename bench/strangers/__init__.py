"""Public programs that torchtrim was not written for: which, with what data, and how they are run."""
