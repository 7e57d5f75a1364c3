"""Weights and checkpoints as files: formats, bytes and names. Knows neither torch nor jax."""
