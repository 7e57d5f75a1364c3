"""The recipe: its sections, what may stand in them, and how it is read."""
