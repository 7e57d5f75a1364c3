"""Saves a sharded state as a checkpoint, and loads it again on any number of ranks."""
