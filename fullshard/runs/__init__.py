"""Training on top of an engine: the loop and what it shows."""
