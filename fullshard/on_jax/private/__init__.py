"""Private names of JAX, each in one place."""
