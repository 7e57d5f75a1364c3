"""A sharded state as files, and back."""
