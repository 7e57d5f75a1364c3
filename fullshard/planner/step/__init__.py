"""One training step under a plan: its operations in order, and the sizes they work with."""
